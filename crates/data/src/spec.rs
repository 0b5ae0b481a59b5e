//! The data spec, the string after `--data`: which set, and where it lies. Parsing is pure; [`crate::dataset`] looks at the disk.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::DataError;
use crate::dataset::CLASSES_MAX;

const FORMS: &str =
    "shapes, cifar10:DIR, mnist:DIR, folder:DIR, remote:HOST:PORT, text:FILE or synthetic:WxHxC/CLASSES";

/// The largest side and channel count a synthetic set may have: bounds on what one sample can allocate.
pub(crate) const SIDE_MAX: usize = 8192;
const CHANNELS_MAX: usize = 4;
const COUNT_MAX: usize = u32::MAX as usize;

/// Which data set. Written and read as the string the user types.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Spec {
    /// Shapes drawn by code; needs nothing.
    Shapes,
    /// CIFAR-10's binary files, in the folder or in the user's data folder.
    Cifar10(Option<PathBuf>),
    /// MNIST's idx files (or those of a set in its format), in the folder or in the user's data folder.
    Mnist(Option<PathBuf>),
    /// Photographs as `train|val/CLASS/*.jpg|png`.
    Folder(Option<PathBuf>),
    /// Photographs that `paceline data serve` lends, at this `HOST:PORT`.
    Remote(String),
    /// A text file, for character language models.
    Text(PathBuf),
    /// Random images, for benchmarks.
    Synthetic(Shape),
}

/// The shape of a synthetic set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Pixels across.
    pub width: usize,
    /// Pixels down.
    pub height: usize,
    /// Values per pixel, 1 to 4.
    pub channels: usize,
    /// How many classes.
    pub classes: usize,
    /// Training samples.
    pub count: usize,
}

impl Shape {
    /// Training samples unless the spec says otherwise.
    pub const COUNT: usize = 10_000;
}

impl Spec {
    /// The names of the sets that need no program of one's own.
    pub const NAMES: [&'static str; 7] = ["shapes", "cifar10", "mnist", "folder", "remote", "text", "synthetic"];
}

impl FromStr for Spec {
    type Err = DataError;

    fn from_str(text: &str) -> Result<Self, DataError> {
        let (name, place) = match text.split_once(':') {
            Some((name, place)) => (name, Some(place)),
            None => (text, None),
        };
        if place == Some("") {
            return Err(DataError::refused(format!("--data {text} ends after the colon; type one of {FORMS}")));
        }
        let folder = place.map(PathBuf::from);
        match (name, place) {
            ("shapes", None) => Ok(Self::Shapes),
            ("shapes", Some(_)) => {
                Err(DataError::refused("shapes is built in and takes no folder; type --data shapes"))
            }
            ("cifar10", _) => Ok(Self::Cifar10(folder)),
            ("mnist", _) => Ok(Self::Mnist(folder)),
            ("folder", _) => Ok(Self::Folder(folder)),
            ("remote", Some(address)) if has_port(address) => Ok(Self::Remote(address.into())),
            ("remote", _) => Err(DataError::refused(
                "remote needs the address and port at which `paceline data serve` lends samples; type for example \
                 --data remote:10.0.0.1:29410",
            )),
            ("text", Some(file)) => Ok(Self::Text(file.into())),
            ("text", None) => Err(DataError::refused("text needs a file; type --data text:FILE")),
            ("synthetic", Some(shape)) => parse_shape(shape).map(Self::Synthetic),
            ("synthetic", None) => {
                Err(DataError::refused("synthetic needs a shape; type for example --data synthetic:224x224x3/1000"))
            }
            _ => Err(DataError::refused(format!("no data set is called '{name}'; type --data with one of {FORMS}"))),
        }
    }
}

/// Whether text ends like an address with a port. Whether it is one is for whoever dials it.
fn has_port(address: &str) -> bool {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    port.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// `WxHxC/CLASSES` or `WxHxC/CLASSES/COUNT`.
fn parse_shape(text: &str) -> Result<Shape, DataError> {
    let refuse = |why: String| {
        DataError::refused(format!("synthetic:{text} {why}; type for example --data synthetic:224x224x3/1000"))
    };
    let parts: Vec<&str> = text.split('/').collect();
    let (size, classes, count) = match parts[..] {
        [size, classes] => (size, classes, None),
        [size, classes, count] => (size, classes, Some(count)),
        _ => return Err(refuse("is not WIDTHxHEIGHTxCHANNELS/CLASSES".into())),
    };
    let [width, height, channels] = size.split('x').collect::<Vec<_>>()[..] else {
        return Err(refuse(format!("has a size '{size}' that is not WIDTHxHEIGHTxCHANNELS")));
    };
    let number = |what: &str, digits: &str, most: usize| match digits.parse::<usize>() {
        Ok(value) if (1..=most).contains(&value) => Ok(value),
        _ => Err(refuse(format!("has {what} '{digits}', which is not a number from 1 to {most}"))),
    };
    Ok(Shape {
        width: number("width", width, SIDE_MAX)?,
        height: number("height", height, SIDE_MAX)?,
        channels: number("channels", channels, CHANNELS_MAX)?,
        classes: number("classes", classes, CLASSES_MAX)?,
        count: count.map_or(Ok(Shape::COUNT), |count| number("sample count", count, COUNT_MAX))?,
    })
}

impl fmt::Display for Spec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with_folder = |out: &mut fmt::Formatter<'_>, name: &str, folder: &Option<PathBuf>| match folder {
            Some(folder) => write!(out, "{name}:{}", folder.display()),
            None => out.write_str(name),
        };
        match self {
            Self::Shapes => out.write_str("shapes"),
            Self::Cifar10(folder) => with_folder(out, "cifar10", folder),
            Self::Mnist(folder) => with_folder(out, "mnist", folder),
            Self::Folder(folder) => with_folder(out, "folder", folder),
            Self::Remote(address) => write!(out, "remote:{address}"),
            Self::Text(file) => write!(out, "text:{}", file.display()),
            Self::Synthetic(shape) => {
                write!(out, "synthetic:{}x{}x{}/{}", shape.width, shape.height, shape.channels, shape.classes)?;
                if shape.count == Shape::COUNT { Ok(()) } else { write!(out, "/{}", shape.count) }
            }
        }
    }
}

impl TryFrom<String> for Spec {
    type Error = DataError;

    fn try_from(text: String) -> Result<Self, DataError> {
        text.parse()
    }
}

impl From<Spec> for String {
    fn from(spec: Spec) -> Self {
        spec.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_spec_reads_back_as_it_was_written() {
        for text in [
            "shapes",
            "cifar10",
            "cifar10:/data/cifar",
            "mnist:m",
            "folder:a:b",
            "remote:10.0.0.1:29410",
            "remote:[::1]:80",
            "text:input.txt",
            "synthetic:224x160x3/1000",
            "synthetic:8x8x1/2/64",
        ] {
            assert_eq!(text.parse::<Spec>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_refusal_says_what_to_type() {
        for (text, part) in [
            ("imagenet", "type --data with one of shapes, cifar10:DIR"),
            ("", "no data set is called ''"),
            ("cifar10:", "ends after the colon"),
            ("shapes:x", "type --data shapes"),
            ("text", "type --data text:FILE"),
            ("remote", "type for example --data remote:10.0.0.1:29410"),
            ("remote:host", "paceline data serve"),
            ("remote:host:0", "paceline data serve"),
            ("synthetic", "type for example --data synthetic:224x224x3/1000"),
            ("synthetic:0x8x3/10", "width '0', which is not a number from 1 to 8192"),
            ("synthetic:8x8/10", "'8x8' that is not WIDTHxHEIGHTxCHANNELS"),
            ("synthetic:8x8x3", "is not WIDTHxHEIGHTxCHANNELS/CLASSES"),
            ("synthetic:8x8x3/-4", "classes '-4'"),
        ] {
            let sentence = text.parse::<Spec>().unwrap_err().to_string();
            assert!(sentence.contains(part), "{text}: {sentence}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,40}", shape in "synthetic:[0-9x/]{0,30}") {
            for text in [text, shape] {
                if let Ok(spec) = text.parse::<Spec>() {
                    prop_assert_eq!(spec.to_string().parse::<Spec>().unwrap(), spec);
                }
            }
        }
    }
}
