//! One model of each of the zoo's families, for tests that take too long for all 29: those of the others are part of `cargo x ci`.

use paceline_nn::zoo::{self, Entry};

/// Of the residual networks the deepest, where rounding has the longest way to grow.
pub const REPRESENTATIVES: [&str; 12] = [
    "mlp",
    "lenet5",
    "cnn5",
    "resnet20",
    "alexnet",
    "vgg11_bn",
    "resnet152",
    "resnet50v2",
    "googlenet",
    "mobilenet",
    "xception",
    "gpt",
];

/// The representatives, or all other models.
pub fn models(representatives: bool) -> impl Iterator<Item = &'static Entry> {
    zoo::all().iter().filter(move |entry| REPRESENTATIVES.contains(&entry.name) == representatives)
}

#[test]
fn every_family_has_one_representative() {
    let mut families: Vec<&str> = REPRESENTATIVES.map(|name| zoo::find(name).unwrap().family).to_vec();
    let mut known: Vec<&str> = zoo::all().iter().map(|entry| entry.family).collect();
    known.dedup();
    families.sort_unstable();
    known.sort_unstable();
    assert_eq!(families, known);
}
