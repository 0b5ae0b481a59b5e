//! The model zoo: networks that people know by name, rebuilt layer by layer so that counts, weights and numbers agree
//! with the frameworks they come from. One file per family.
//!
//! A zoo entry is a [`Model`] with a name; `paceline models` lists them and `docs/models.md` says where each layout
//! comes from. What is absent: weights, data, and any knowledge of how a model is trained or split.

mod alexnet;
mod cifar;
mod cnn5;
mod googlenet;
mod gpt;
mod inception_resnet_v2;
mod inception_v3;
mod keras;
mod lenet;
mod lstm;
mod mlp;
mod mobilenet;
mod nearest;
mod resnet;
mod resnet_v2;
mod vgg;
mod xception;

use paceline_tensor::{GraphError, Value};

use crate::net::{Input, Model, Net};

/// One named model.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name a user types.
    pub name: &'static str,
    /// The family it belongs to, by which lists are grouped.
    pub family: &'static str,
    /// The input it was designed for.
    pub native: Input,
    /// The smallest image side (or sequence) for which the arithmetic is defined; smaller images must be enlarged.
    pub smallest: usize,
    /// The class count (or vocabulary) of the published figures.
    pub classes: usize,
    /// One line for lists.
    pub summary: &'static str,
    build: fn(&mut Net, Value, usize) -> Result<Value, GraphError>,
}

impl Model for Entry {
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        (self.build)(net, x, classes)
    }
}

/// A name that is not in the zoo.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown model `{name}`; {}`paceline models` lists all", suggestion(.near))]
pub struct UnknownModel {
    /// What was asked for.
    pub name: String,
    /// The names that are spelled nearly so, nearest first.
    pub near: Vec<String>,
}

impl UnknownModel {
    /// A name that is none of `known`.
    pub(crate) fn among<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Self {
        let near = nearest::names(name, known).into_iter().map(str::to_owned).collect();
        Self { name: name.to_owned(), near }
    }
}

fn suggestion(near: &[String]) -> String {
    if near.is_empty() {
        return String::new();
    }
    let names: Vec<String> = near.iter().map(|name| format!("`{name}`")).collect();
    format!("did you mean {}? ", names.join(" or "))
}

static ALL: [Entry; 29] = [
    mlp::MLP,
    lenet::LENET5,
    cnn5::CNN5,
    cifar::RESNET9,
    cifar::RESNET20,
    alexnet::ALEXNET,
    vgg::VGG11,
    vgg::VGG13,
    vgg::VGG16,
    vgg::VGG19,
    vgg::VGG11_BN,
    vgg::VGG13_BN,
    vgg::VGG16_BN,
    vgg::VGG19_BN,
    resnet::RESNET18,
    resnet::RESNET34,
    resnet::RESNET50,
    resnet::RESNET101,
    resnet::RESNET152,
    resnet_v2::RESNET50V2,
    resnet_v2::RESNET101V2,
    resnet_v2::RESNET152V2,
    googlenet::GOOGLENET,
    inception_v3::INCEPTIONV3,
    inception_resnet_v2::INCEPTIONRESNETV2,
    mobilenet::MOBILENET,
    xception::XCEPTION,
    lstm::LSTM,
    gpt::GPT,
];

/// Every model, families together, small ones first.
pub fn all() -> &'static [Entry] {
    &ALL
}

/// The model of this name.
///
/// # Errors
/// When there is none; the sentence proposes names that are spelled nearly so.
pub fn find(name: &str) -> Result<&'static Entry, UnknownModel> {
    let known = || all().iter().map(|entry| entry.name);
    all().iter().find(|entry| entry.name == name).ok_or_else(|| UnknownModel::among(name, known()))
}

/// A square colour image.
const fn image(side: usize) -> Input {
    Input::Image { size: [side, side], channels: 3 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for (index, entry) in all().iter().enumerate() {
            assert_eq!(find(entry.name).unwrap().name, entry.name);
            assert!(all()[..index].iter().all(|other| other.name != entry.name), "{} is there twice", entry.name);
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_near_ones() {
        let sentence = |name| find(name).unwrap_err().to_string();
        assert_eq!(
            sentence("resnet5"),
            "unknown model `resnet5`; did you mean `resnet50` or `resnet9`? `paceline models` lists all"
        );
        assert_eq!(sentence("bicycle"), "unknown model `bicycle`; `paceline models` lists all");
    }
}
