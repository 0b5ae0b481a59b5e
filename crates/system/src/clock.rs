//! Time, the one place it is read. A [`Clock`] is either the machine's or one that a test turns by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of time since some fixed start, cheap to clone and to share.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Real(Instant),
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's monotonic clock, starting now.
    pub fn real() -> Self {
        Self(Source::Real(Instant::now()))
    }

    /// A clock that stands still until [`Clock::advance`] is called.
    pub fn manual() -> Self {
        Self(Source::Manual(Arc::new(AtomicU64::new(0))))
    }

    /// Time since the clock was made.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Source::Real(start) => start.elapsed(),
            Source::Manual(nanos) => Duration::from_nanos(nanos.load(Ordering::SeqCst)),
        }
    }

    /// Seconds since the clock was made.
    pub fn seconds(&self) -> f64 {
        self.now().as_secs_f64()
    }

    /// Turns a manual clock forward.
    ///
    /// # Panics
    /// On the real clock, which nobody turns.
    pub fn advance(&self, by: Duration) {
        match &self.0 {
            Source::Real(_) => panic!("the real clock cannot be advanced"),
            Source::Manual(nanos) => {
                nanos.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
            }
        }
    }
}

/// Lets the calling thread rest for so long, by the real clock.
pub fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}

/// Wall-clock seconds since 1970, for names and event stamps; never for durations.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// `unix` as `YYYY-MM-DD HH:MM:SS` in UTC.
pub fn format_utc(unix: u64) -> String {
    let (days, second) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = civil_from_days(days as i64);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

/// Days since 1970-01-01 to (year, month, day): shift to a year that starts in March, so that leap days come last,
/// then divide by the lengths of 400-year, one-year and one-month cycles.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utc_is_formatted_across_leap_days() {
        assert_eq!(format_utc(0), "1970-01-01 00:00:00");
        assert_eq!(format_utc(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(format_utc(1_763_193_599), "2025-11-15 07:59:59");
    }

    #[test]
    fn a_manual_clock_moves_only_when_told() {
        let clock = Clock::manual();
        assert_eq!(clock.seconds(), 0.0);
        clock.advance(Duration::from_millis(1500));
        assert_eq!(clock.clone().seconds(), 1.5);
    }
}
