//! Numbers as people read them: 1,234,567 · 92.41% · 3 min 05 s · 1.5 GiB.

/// `value` with commas between thousands.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `value` to about `digits` significant digits, without an exponent where that stays short.
pub(crate) fn significant(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "not a number".into();
    }
    let magnitude = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    if magnitude < -4 {
        return format!("{value:.*e}", digits.saturating_sub(1));
    }
    let decimals = (digits as i32 - 1 - magnitude).clamp(0, 9) as usize;
    if decimals == 0 && value >= 1000.0 { count(value.round() as u64) } else { format!("{value:.decimals$}") }
}

/// A share of one as a percentage with two decimals.
pub(crate) fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.2}%", share * 100.0) } else { "not a number".into() }
}

/// A share of one as a percentage with one decimal.
pub(crate) fn percent_short(share: f64) -> String {
    if share.is_finite() { format!("{:.1}%", share * 100.0) } else { "–".into() }
}

/// A duration, in the two largest units that matter.
pub(crate) fn seconds(value: f64) -> String {
    if !value.is_finite() {
        return "unknown".into();
    }
    let whole = value.round() as u64;
    match value {
        0.0 => "0 s".into(),
        v if v < 0.000_999_5 => format!("{:.0} µs", v * 1e6),
        v if v < 0.099_95 => format!("{:.1} ms", v * 1e3),
        v if v < 0.999_5 => format!("{:.0} ms", v * 1e3),
        v if v < 59.95 => format!("{v:.1} s"),
        _ if whole < 3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
    }
}

/// Memory in binary units.
pub(crate) fn bytes(value: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = value as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value} B") } else { format!("{scaled:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [significant(2.512_585, 4), significant(12_345.6, 3), significant(0.0, 2)],
            ["2.513", "12,346", "0.0"]
        );
        assert_eq!([significant(0.000_012_3, 2), significant(f64::NAN, 3)], ["1.2e-5", "not a number"]);
        assert_eq!([percent(0.924_12), percent_short(0.05)], ["92.41%", "5.0%"]);
        assert_eq!([bytes(12), bytes(1536), bytes(8 << 30)], ["12 B", "1.5 KiB", "8.0 GiB"]);
    }

    #[test]
    fn durations_take_their_unit_from_their_size() {
        let read: Vec<String> = [0.000_05, 0.012, 0.35, 0.999_9, 12.34, 59.99, 185.0, 7384.0].map(seconds).into();
        assert_eq!(read, ["50 µs", "12.0 ms", "350 ms", "1.0 s", "12.3 s", "1 min 00 s", "3 min 05 s", "2 h 03 min"]);
    }
}
