//! The class names of a weights file, which came from anywhere: as many as a data set may have, and no more. They are counted
//! as they are read, so that a file with millions of them is refused before they fill the memory.

use std::fmt;

use paceline_data::dataset::{CLASS_NAMES_BYTES_MAX, CLASSES_MAX};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// Reads a list of names.
///
/// # Errors
/// When there are too many, or they are too long.
pub(crate) fn within_bounds<'de, D: Deserializer<'de>>(source: D) -> Result<Vec<String>, D::Error> {
    source.deserialize_seq(Names)
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = Vec<String>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "a list of class names")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let (mut names, mut bytes) = (Vec::new(), 0);
        while let Some(name) = list.next_element::<String>()? {
            bytes += name.len();
            if names.len() == CLASSES_MAX {
                return Err(A::Error::custom(format!("it has more than {CLASSES_MAX} class names")));
            }
            if bytes > CLASS_NAMES_BYTES_MAX {
                return Err(A::Error::custom(format!(
                    "its class names have more than {CLASS_NAMES_BYTES_MAX} bytes together"
                )));
            }
            names.push(name);
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Vec<String>, serde_json::Error> {
        within_bounds(&mut serde_json::Deserializer::from_str(json))
    }

    #[test]
    fn names_are_counted_as_they_are_read() {
        assert_eq!(read(r#"["cat", "dog"]"#).unwrap(), ["cat", "dog"]);
        let list = |count: usize, name: &str| format!("[{}]", vec![format!("\"{name}\""); count].join(","));
        assert_eq!(read(&list(CLASSES_MAX, "a")).unwrap().len(), CLASSES_MAX);
        assert!(read(&list(CLASSES_MAX + 1, "a")).unwrap_err().to_string().contains("more than 262144 class names"));
        assert!(read(&list(5, &"a".repeat(1 << 20))).unwrap_err().to_string().contains("4194304 bytes"));
    }
}
