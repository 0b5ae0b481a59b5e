//! Where convolutions may go by tiles: a switch for those who compare with, or insist on, direct sums.

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// Which convolutions may be computed by tiles (Winograd).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Winograd {
    /// All that it is faster for.
    #[default]
    Auto,
    /// Of them those in `f32`: in bf16 it rounds the mapped values too.
    F32,
    /// None.
    Off,
}

impl Winograd {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Auto, Self::F32, Self::Off];

    /// Whether images of this type may go by tiles.
    pub fn allows(self, dtype: DType) -> bool {
        match self {
            Self::Auto => true,
            Self::F32 => dtype == DType::F32,
            Self::Off => false,
        }
    }
}

impl std::fmt::Display for Winograd {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::Off => "off",
        })
    }
}

impl std::str::FromStr for Winograd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.to_string() == text);
        found.ok_or_else(|| format!("`{text}` does not say where tiles may be used; type auto, f32 or off"))
    }
}
