//! Spans of time as people write them: `500ms`, `15s`, `2m`, `1h`.

use std::time::Duration;

/// A span above zero: a number, with ms, s, m or h behind it; seconds where nothing is.
///
/// # Errors
/// What to type instead.
pub fn parse(text: &str) -> Result<Duration, String> {
    let (digits, unit) = text.split_at(text.find(|sign: char| sign.is_ascii_alphabetic()).unwrap_or(text.len()));
    let unit_s = match unit {
        "ms" => Some(1e-3),
        "" | "s" => Some(1.0),
        "m" | "min" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let seconds = digits.parse::<f64>().ok().zip(unit_s).map(|(number, unit_s)| number * unit_s);
    let span = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    span.filter(|span| !span.is_zero()).ok_or_else(|| "type a time such as 500ms, 90s, 10m or 2h".into())
}

/// A span as [`parse`] reads it, in the largest unit of which it is a whole number.
pub fn text(span: Duration) -> String {
    let milliseconds = span.as_millis();
    match milliseconds {
        _ if milliseconds > 0 && milliseconds.is_multiple_of(3_600_000) => format!("{}h", milliseconds / 3_600_000),
        _ if milliseconds > 0 && milliseconds.is_multiple_of(60_000) => format!("{}m", milliseconds / 60_000),
        _ if milliseconds.is_multiple_of(1000) => format!("{}s", milliseconds / 1000),
        _ => format!("{milliseconds}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_units() {
        for (written, milliseconds) in [("90", 90_000), ("1.5m", 90_000), ("2h", 7_200_000), ("500ms", 500)] {
            assert_eq!(parse(written), Ok(Duration::from_millis(milliseconds)));
        }
        assert!(["", "m", "-3s", "0s", "3 weeks", "nan", "1e300h"].iter().all(|written| parse(written).is_err()));
    }

    #[test]
    fn spans_survive_being_written() {
        for milliseconds in [1, 999, 1000, 1500, 15_000, 60_000, 90_000, 3_600_000, 5_400_000] {
            let span = Duration::from_millis(milliseconds);
            assert_eq!(parse(&text(span)), Ok(span), "{}", text(span));
        }
    }
}
