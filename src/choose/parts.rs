//! Which ways to compute layers in several parts are worth looking at for a model: all by channels, branches on a part each where there are
//! some, and the forms that a dynamic programme over layers finds fastest for what they cost: by samples, by channels, or whole.

use crate::nn::{Mode, Network};
use crate::tensor::Graph;
use crate::tensor::op::Op;
use crate::tensor::part::{Form, Prices, search};
use crate::train::Config;
use crate::train::together::{PartSplit, Split};

use super::apply::Subject;

/// Seconds for a byte and for a message between processes that share memory. What a node really has is measured; the search only has to
/// know that bytes are cheap here and messages are not free.
const PER_BYTE_S: f64 = 1.0 / 4e9;
const PER_MESSAGE_S: f64 = 30e-6;

/// Operations in a second of one core, where nothing was measured yet: what layers cost beside messages.
const FLOPS_PER_S: f64 = 40e9;

/// The splits into so many parts.
pub fn proposals(subject: &Subject<'_>, config: &Config, parts: usize) -> Vec<Split> {
    let all = |form| Split::Parts(PartSplit { forms: vec![(String::new(), form)], parts });
    let mut found = vec![all(Form::Channel), all(Form::Branch)];
    let hybrid = forward(subject, config).and_then(|graph| fastest(&graph, parts, config.batch));
    found.extend(hybrid.filter(|split| !found.contains(split)));
    found
}

/// Why a split into parts makes no sense for a model, if it does not.
pub fn senseless(split: &Split, subject: &Subject<'_>, config: &Config) -> Option<String> {
    let Split::Parts(PartSplit { forms, .. }) = split else { return None };
    let by_branches = forms.iter().all(|(_, form)| *form == Form::Branch);
    let has_branches = |graph: &Graph| graph.nodes().iter().any(|node| matches!(node.op, Op::Concat { .. }));
    let none = by_branches && forward(subject, config).is_some_and(|graph| !has_branches(&graph));
    none.then(|| "the model has no branches that meet again".to_owned())
}

fn forward(subject: &Subject<'_>, config: &Config) -> Option<Graph> {
    let Subject { model, input, classes, .. } = *subject;
    let network = Network::without_gradients(model, Mode::Train, config.batch, input, classes, config.label_smoothing);
    network.ok().map(|network| network.graph)
}

/// The forms that are expected to be fastest, of layers or of names in front of layers that agree.
fn fastest(graph: &Graph, parts: usize, batch: usize) -> Option<Split> {
    let nodes = graph.nodes().iter().map(|node| 3.0 * graph.flops(node) as f64 / FLOPS_PER_S).collect();
    let prices =
        Prices { nodes, per_byte: PER_BYTE_S, per_message: PER_MESSAGE_S, samples: batch as f64, memory: None };
    let forms = grouped(search(graph, parts, &prices)?.forms);
    // All by channels is looked at anyway, and all by samples are workers.
    let is_mixed = forms.iter().any(|(_, form)| *form != forms[0].1);
    is_mixed.then_some(Split::Parts(PartSplit { forms, parts }))
}

/// Layers whose names begin alike, and have the same form, under one name.
fn grouped(forms: Vec<(String, Form)>) -> Vec<(String, Form)> {
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let mut groups: Vec<(String, Form)> = Vec::new();
    for (layer, form) in &forms {
        let name = first(layer);
        let agree = forms.iter().filter(|(other, _)| first(other) == name).all(|(_, other)| other == form);
        let entry = (if agree { name } else { layer.clone() }, *form);
        if !groups.contains(&entry) {
            groups.push(entry);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::Registry;

    fn with<T>(model: &str, look: impl FnOnce(&Subject<'_>, &Config) -> T) -> T {
        let (registry, config) = (Registry::new(), Config { model: model.into(), batch: 8, ..Config::default() });
        let model = registry.find_model(model).unwrap();
        look(&Subject { model: &model, input: model.native, classes: 10, held_bytes: 0 }, &config)
    }

    fn words(model: &str) -> Vec<String> {
        with(model, |subject, config| proposals(subject, config, 2).iter().map(ToString::to_string).collect())
    }

    #[test]
    fn convolutions_by_samples_and_large_linear_layers_by_channels_are_found() {
        let found = words("alexnet");
        assert_eq!(found[..2], ["channel:2", "branch:2"]);
        assert!(
            found
                .iter()
                .any(|word| word.contains("features") && word.contains("=replicate") && word.contains("=channel")),
            "{found:?}"
        );
    }

    #[test]
    fn branches_are_for_models_that_have_some() {
        let by_branches = || proposals_of("branch:2");
        let why = |model| with(model, |subject, config| senseless(&by_branches(), subject, config));
        assert_eq!(why("googlenet"), None);
        assert_eq!(why("lenet5").as_deref(), Some("the model has no branches that meet again"));
        assert_eq!(with("lenet5", |subject, config| senseless(&proposals_of("channel:2"), subject, config)), None);
    }

    fn proposals_of(word: &str) -> Split {
        word.parse().unwrap()
    }

    #[test]
    fn names_are_as_short_as_forms_agree() {
        let forms = [
            ("features.0", Form::Replicate),
            ("features.3", Form::Replicate),
            ("fc.1", Form::Channel),
            ("fc.2", Form::Replicate),
        ];
        let found = grouped(forms.map(|(name, form)| (name.to_owned(), form)).to_vec());
        let expected = [("features", Form::Replicate), ("fc.1", Form::Channel), ("fc.2", Form::Replicate)];
        assert_eq!(found, expected.map(|(name, form)| (name.to_owned(), form)));
    }
}
