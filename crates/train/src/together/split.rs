//! How a model is split over the ranks of a worker: a word on the command line and in files, or a table in a file.
//!
//! `pipeline:2` cuts it into stages. `channel:2` and `branch:2` compute every layer in parts, and `features=replicate,classifier=channel:2`
//! says of some layers how. In a file the last is `split = { parts = 2, features = "replicate", classifier = "channel" }` too.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use paceline_tensor::part::Form;
use serde::{Deserialize, Deserializer, Serialize};

/// How the model is split over processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum Split {
    /// Every worker has all of it.
    #[default]
    Replicate,
    /// Each worker is so many stages, one behind the other.
    Pipeline(usize),
    /// Each worker is so many parts, which compute layers together.
    Parts(PartSplit),
    /// Replicated where it fits, and in as few stages as fit where it does not.
    Auto,
}

/// How layers are computed by parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartSplit {
    /// The form of each layer, by its name or one in front of others; an empty name means all layers. The longest that fits counts.
    pub forms: Vec<(String, Form)>,
    /// How many parts there are.
    pub parts: usize,
}

/// The word in a table for all layers that it does not name.
const OTHERS: &str = "others";

/// The word in a table for how many parts there are.
const PARTS: &str = "parts";

impl Split {
    /// Every answer, in the words of the help.
    pub const WORDS: [&'static str; 6] =
        ["replicate", "pipeline:STAGES", "channel:PARTS", "branch:PARTS", "LAYER=FORM,LAYER=FORM:PARTS", "auto"];
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("replicate"),
            Self::Pipeline(stages) => write!(f, "pipeline:{stages}"),
            Self::Parts(PartSplit { forms, parts }) => {
                let form = |(layer, form): &(String, Form)| match layer.as_str() {
                    "" => form.to_string(),
                    layer => format!("{layer}={form}"),
                };
                write!(f, "{}:{parts}", forms.iter().map(form).collect::<Vec<_>>().join(","))
            }
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.rsplit_once(':') {
            None if text == "replicate" => Ok(Self::Replicate),
            None if text == "auto" => Ok(Self::Auto),
            Some(("pipeline", count)) => match ranks(count) {
                Some(stages) => Ok(Self::Pipeline(stages)),
                None => Err(format!("type pipeline: with 2 to {RANKS_MAX} stages, such as pipeline:2")),
            },
            Some((forms, count)) => {
                let named = forms.split(',').map(PartSplit::form).collect::<Result<Vec<_>, _>>()?;
                PartSplit::new(named, ranks(count)).map(Self::Parts)
            }
            None => Err("type replicate, auto, pipeline: with a number of stages, such as pipeline:2, or channel: or branch: with a \
                         number of parts, such as channel:2, or layers with how each is computed, such as \
                         features=replicate,classifier=channel:2"
                .into()),
        }
    }
}

impl PartSplit {
    fn new(forms: Vec<(String, Form)>, parts: Option<usize>) -> Result<Self, String> {
        let Some(parts) = parts else {
            return Err(format!("type 2 to {RANKS_MAX} parts behind a colon, such as channel:2"));
        };
        for (number, (layer, _)) in forms.iter().enumerate() {
            if forms[..number].iter().any(|(before, _)| before == layer) {
                let layer = if layer.is_empty() { "all layers" } else { layer };
                return Err(format!("the form of {layer} is said twice; type it once"));
            }
        }
        if forms == [(String::new(), Form::Replicate)] {
            return Err(format!(
                "parts that replicate every layer are workers; type --workers {parts}, or channel:{parts}"
            ));
        }
        Ok(Self { forms, parts })
    }

    /// A form, of a layer that is named before it or of all.
    fn form(text: &str) -> Result<(String, Form), String> {
        let (layer, form) = text.split_once('=').unwrap_or(("", text));
        if text.contains('=') && layer.is_empty() {
            return Err(format!("`{text}` names no layer; type one, such as classifier{text}"));
        }
        Ok((layer.to_owned(), form.parse()?))
    }
}

/// More ranks than any replica gains by.
const RANKS_MAX: usize = 256;

fn ranks(text: &str) -> Option<usize> {
    text.parse().ok().filter(|count| (2..=RANKS_MAX).contains(count))
}

/// As a file may say it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Word(String),
    Table(BTreeMap<String, Entry>),
}

/// What stands behind a key of the table.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Count(usize),
    Form(String),
}

impl TryFrom<Said> for Split {
    type Error = String;

    fn try_from(said: Said) -> Result<Self, String> {
        let table = match said {
            Said::Word(word) => return word.parse(),
            Said::Table(table) => table,
        };
        let (mut forms, mut parts) = (Vec::new(), None);
        for (key, entry) in table {
            match entry {
                Entry::Count(count) if key == PARTS => parts = Some(count),
                Entry::Form(form) if key != PARTS => {
                    let layer = if key == OTHERS { String::new() } else { key };
                    forms.push((layer, form.parse()?));
                }
                _ => {
                    return Err(format!(
                        "[split] does not know `{key}` so; type parts = 2, and layers such as classifier = \"channel\""
                    ));
                }
            }
        }
        let parts = parts.filter(|count| (2..=RANKS_MAX).contains(count));
        PartSplit::new(forms, parts).map(Self::Parts)
    }
}

impl<'de> Deserialize<'de> for Split {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Said::deserialize(deserializer)?.try_into().map_err(serde::de::Error::custom)
    }
}

impl From<Split> for String {
    fn from(split: Split) -> Self {
        split.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn parts(forms: &[(&str, Form)], parts: usize) -> Split {
        let forms = forms.iter().map(|&(layer, form)| (layer.to_owned(), form)).collect();
        Split::Parts(PartSplit { forms, parts })
    }

    #[test]
    fn a_split_is_said_in_one_word() {
        let hybrid = parts(&[("features", Form::Replicate), ("classifier.3", Form::Channel)], 4);
        for (word, split) in [
            ("replicate", Split::Replicate),
            ("auto", Split::Auto),
            ("pipeline:3", Split::Pipeline(3)),
            ("channel:2", parts(&[("", Form::Channel)], 2)),
            ("branch:2", parts(&[("", Form::Branch)], 2)),
            ("features=replicate,classifier.3=channel:4", hybrid),
            ("channel,features=replicate:2", parts(&[("", Form::Channel), ("features", Form::Replicate)], 2)),
        ] {
            assert_eq!(word.parse::<Split>().as_ref(), Ok(&split));
            assert_eq!(split.to_string(), word);
        }
        for (word, words) in [
            ("channel", "such as channel:2"),
            ("channel:1", "2 to 256 parts"),
            ("rows:2", "`rows` is not a form"),
            ("fc=rows:2", "`rows` is not a form"),
            ("=channel:2", "type one, such as classifier=channel"),
            ("fc=channel,fc=branch:2", "the form of fc is said twice"),
            ("replicate:2", "type --workers 2"),
            ("pipeline:0", "pipeline: with 2 to"),
            ("", "type replicate"),
        ] {
            let refused = word.parse::<Split>().unwrap_err();
            assert!(refused.contains(words), "{word}: {refused}");
        }
    }

    #[test]
    fn a_file_may_say_it_in_a_table_and_keeps_a_word() {
        let table = "[split]\nparts = 2\nfeatures = \"replicate\"\n\"classifier.3\" = \"channel\"\nothers = \"branch\"";
        let config = Config::from_toml(table).unwrap();
        let word = config.split.to_string();
        assert_eq!(word, "classifier.3=channel,features=replicate,branch:2");
        assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config);
        assert!(config.to_toml().contains(&format!("split = \"{word}\"")));
        for (table, words) in [
            ("[split]\nfeatures = \"channel\"", "2 to 256 parts"),
            ("[split]\nparts = \"two\"", "does not know `parts` so"),
            ("[split]\nparts = 2\nfeatures = 3", "does not know `features` so"),
            ("[split]\nparts = 2\nfeatures = \"rows\"", "not a form"),
        ] {
            let error = Config::from_toml(table).unwrap_err().to_string();
            assert!(error.contains(words), "{table}: {error}");
        }
    }
}
