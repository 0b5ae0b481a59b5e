//! How a layer is computed by several parts.

/// See the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// Each part has all weights and computes its share of the samples.
    Replicate,
    /// Each part has and computes its share of the channels.
    Channel,
    /// Each part has and computes some of the branches that meet in one place.
    Branch,
}

impl Form {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::Replicate, Self::Channel, Self::Branch];
}

impl std::fmt::Display for Form {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Self::Replicate => "replicate",
            Self::Channel => "channel",
            Self::Branch => "branch",
        })
    }
}

impl std::str::FromStr for Form {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|form| form.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is not a form of a layer; type replicate, channel or branch"))
    }
}
