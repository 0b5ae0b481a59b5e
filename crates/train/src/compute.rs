//! Where a replica computes: the config's `device`.

use serde::{Deserialize, Serialize};

/// The CPU, or a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compute {
    /// This machine's cores.
    #[default]
    Cpu,
    /// An NVIDIA GPU: the one with this number, or the one that falls to the process.
    Cuda(Option<usize>),
}

impl std::fmt::Display for Compute {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(None) => formatter.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(formatter, "cuda:{number}"),
        }
    }
}

impl std::str::FromStr for Compute {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |number: &str| number.parse().ok().filter(|&number: &usize| number < 1024);
        let found = match text {
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(None)),
            _ => text.strip_prefix("cuda:").and_then(number).map(|number| Self::Cuda(Some(number))),
        };
        found.ok_or_else(|| format!("`{text}` is not a device; type cpu, cuda or cuda:1"))
    }
}

impl TryFrom<String> for Compute {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Compute> for String {
    fn from(compute: Compute) -> Self {
        compute.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_written() {
        let all = [
            ("cpu", Compute::Cpu),
            ("cuda", Compute::Cuda(None)),
            ("cuda:0", Compute::Cuda(Some(0))),
            ("cuda:3", Compute::Cuda(Some(3))),
        ];
        for (text, device) in all {
            assert_eq!((text.parse(), device.to_string()), (Ok(device), text.to_owned()));
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999"] {
            assert!(text.parse::<Compute>().unwrap_err().contains("type cpu, cuda or cuda:1"), "{text}");
        }
    }
}
