//! A model whose layers are computed by several parts trains as it does whole: parts as threads, which exchange what their graphs ask for.

#[path = "support/meeting.rs"]
mod meeting;

use meeting::{Meeting, Setting, Trained, train_parts, train_whole};
use paceline_nn::part::PartForm;
use paceline_nn::{Input, Mode, Model, Network, StageNetwork, zoo};
use paceline_tensor::part::{Form, Piece, Traffic, traffic};
use proptest::prelude::*;

fn forms(text: &str) -> Vec<(String, Form)> {
    let form = |part: &str| match part.split_once('=') {
        Some((layer, form)) => (layer.to_owned(), form.parse().unwrap()),
        None => (String::new(), part.parse().unwrap()),
    };
    text.split(',').map(form).collect()
}

/// Ten steps of a model in so many parts, held against the same steps of the whole model.
fn trains_as_whole(name: &str, setting: Setting, splits: &[(&str, usize)]) {
    let model = zoo::find(name).unwrap();
    let whole = train_whole(model, &setting);
    for &(split, parts) in splits {
        let form = PartForm { forms: forms(split), parts, own: 0 };
        let trained = train_parts(model, &setting, &form);
        same(&format!("{name} {split}:{parts}"), &whole, &trained);
    }
}

/// Within 1e-5 of each tensor's largest weight.
fn same(what: &str, whole: &Trained, parts: &[Trained]) {
    for (own, part) in parts.iter().enumerate() {
        for (step, (expected, found)) in whole.losses.iter().zip(&part.losses).enumerate() {
            assert!(
                (expected - found).abs() <= 1e-5 * expected.abs().max(1.0),
                "{what}, part {own}, step {step}: loss {found}, not {expected}"
            );
        }
        for ((name, expected), (_, found)) in whole.tensors_of(part).iter().zip(&part.tensors) {
            let largest = expected.whole.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            assert_eq!(expected.own.len(), found.len(), "{what}, part {own}: {name}");
            for (index, (a, b)) in expected.own.iter().zip(found).enumerate() {
                assert!(
                    (a - b).abs() <= 1e-5 * largest.max(1e-2),
                    "{what}, part {own}: {name}[{index}] is {b}, not {a}, of at most {largest}"
                );
            }
        }
    }
}

const CIFAR: Setting = Setting { size: 32, channels: 3, classes: 10, batch: 7, steps: 10 };
const DIGITS: Setting = Setting { size: 28, channels: 1, classes: 10, batch: 7, steps: 10 };

#[test]
fn lenet_trains_in_parts_as_it_does_whole() {
    trains_as_whole("lenet5", DIGITS, &[("channel", 2), ("channel", 3), ("replicate", 2), ("branch", 2)]);
}

#[test]
fn batch_norms_take_the_same_statistics_by_channels() {
    trains_as_whole("cnn5", CIFAR, &[("channel", 2), ("channel", 3)]);
}
