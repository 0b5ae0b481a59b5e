//! How long what may take: the table `[deadlines]` of a configuration. Every wait of a run ends by one of these.

use std::time::Duration;

use paceline_system::span;
use serde::{Deserialize, Serialize};

/// How long what may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Deadlines {
    /// Others wait for a rank for so long before it is called late; the run goes on.
    #[serde(with = "written")]
    pub late: Duration,
    /// Nothing is heard of a rank for so long before the run ends.
    #[serde(with = "written")]
    pub silent: Duration,
    /// Until all ranks have come to the rendezvous.
    #[serde(with = "written")]
    pub gather: Duration,
    /// Until all that have come are connected to each other.
    #[serde(with = "written")]
    pub connect: Duration,
    /// For one message, or one step of GPUs that add up among themselves, between ranks that are all alive.
    #[serde(with = "written")]
    pub message: Duration,
    /// Until all others have ended as well.
    #[serde(with = "written")]
    pub farewell: Duration,
    /// For one batch of data.
    #[serde(with = "written")]
    pub batch: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            late: Duration::from_secs(1),
            silent: Duration::from_secs(15),
            gather: Duration::from_secs(120),
            connect: Duration::from_secs(60),
            message: Duration::from_secs(600),
            farewell: Duration::from_secs(60),
            batch: Duration::from_secs(600),
        }
    }
}

/// The shortest and the longest that make sense: heartbeats come twenty times a second at most, and nobody waits for a
/// month.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(31 * 24 * 3600);

impl Deadlines {
    /// What is wrong with one of them: a sentence that says what to type.
    pub fn refusal(&self) -> Option<String> {
        let named = [
            ("late", self.late),
            ("silent", self.silent),
            ("gather", self.gather),
            ("connect", self.connect),
            ("message", self.message),
            ("farewell", self.farewell),
            ("batch", self.batch),
        ];
        if let Some((name, span)) = named.into_iter().find(|(_, span)| !(LEAST..=MOST).contains(span)) {
            let (span, least) = (span::text(span), span::text(LEAST));
            return Some(format!("a deadline `{name}` of {span} cannot be; type at least {least} and at most 31 days"));
        }
        (self.silent <= self.late).then(|| {
            let (late, silent) = (span::text(self.late), span::text(self.silent));
            format!("--silent {silent} would end a run before a rank is late at {late}; type a longer --silent")
        })
    }
}

/// As text, such as `15s`.
mod written {
    use std::time::Duration;

    use paceline_system::span;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&span::text(*span))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        span::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_names_what_differs_and_the_rest_is_usual() {
        let read: Deadlines = toml::from_str("silent = \"30s\"\nmessage = \"2h\"").unwrap();
        let usual = Deadlines::default();
        assert_eq!(read, Deadlines { silent: 30 * Duration::from_secs(1), message: 12 * usual.message, ..usual });
        assert_eq!(toml::from_str::<Deadlines>(&toml::to_string(&read).unwrap()).unwrap(), read);
        assert!(toml::from_str::<Deadlines>("silent = \"soon\"").unwrap_err().to_string().contains("500ms, 90s"));
        assert!(toml::from_str::<Deadlines>("lately = \"1s\"").is_err());
    }

    #[test]
    fn deadlines_that_cannot_be_are_refused_with_what_to_type() {
        let usual = Deadlines::default();
        assert_eq!(usual.refusal(), None);
        let short = Deadlines { batch: Duration::from_millis(1), ..usual }.refusal().unwrap();
        assert!(short.contains("`batch` of 1ms cannot be; type at least 100ms"), "{short}");
        let early = Deadlines { silent: usual.late, ..usual }.refusal().unwrap();
        assert!(early.contains("type a longer --silent"), "{early}");
    }
}
