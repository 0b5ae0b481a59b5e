//! Every model has the parameters and the arithmetic that its source publishes, and builds at every size it claims.

use paceline_nn::{Input, Mode, Network, zoo};

fn network(entry: &zoo::Entry, mode: Mode, side: usize, classes: usize) -> Network {
    let input = sized(entry.native, side);
    Network::new(entry, mode, 2, input, classes, 0.0)
        .unwrap_or_else(|error| panic!("{} at {side}: {error}", entry.name))
}

fn sized(native: Input, side: usize) -> Input {
    match native {
        Input::Image { channels, .. } => Input::Image { size: [side, side], channels },
        Input::Tokens { .. } => Input::Tokens { sequence: side },
    }
}

fn native_side(entry: &zoo::Entry) -> usize {
    match entry.native {
        Input::Image { size, .. } => size[0],
        Input::Tokens { sequence } => sequence,
    }
}

/// What a published count includes.
#[derive(Clone, Copy, PartialEq)]
enum Counted {
    /// Trained parameters only: torchvision's tables, and papers.
    Trained,
    /// Also the running means and variances: Keras' tables.
    WithStatistics,
}

use Counted::{Trained, WithStatistics};

/// Name, parameters, what they include, forward GMACs of one native sample (here to be met within 0.5%).
///
/// Counts are at 1000 classes, or at the class count of the entry for the small models. torchvision's figures are those
/// of its model table (count and `_ops`); Keras' counts are those of keras.io, its GMACs were counted layer by layer
/// with `tools/fixtures.py --macs`. Those of the language models follow from their sizes.
const PUBLISHED: [(&str, usize, Counted, f64); 29] = [
    ("mlp", 1_841_162, Trained, 0.00184),
    ("lenet5", 61_706, Trained, 0.000_417),
    ("cnn5", 539_178, Trained, 0.0245),
    ("resnet9", 6_573_120, Trained, 0.379),
    ("resnet20", 272_474, Trained, 0.0409),
    ("alexnet", 61_100_840, Trained, 0.714),
    ("vgg11", 132_863_336, Trained, 7.609),
    ("vgg13", 133_047_848, Trained, 11.308),
    ("vgg16", 138_357_544, Trained, 15.470),
    ("vgg19", 143_667_240, Trained, 19.632),
    ("vgg11_bn", 132_868_840, Trained, 7.609),
    ("vgg13_bn", 133_053_736, Trained, 11.308),
    ("vgg16_bn", 138_365_992, Trained, 15.470),
    ("vgg19_bn", 143_678_248, Trained, 19.632),
    ("resnet18", 11_689_512, Trained, 1.814),
    ("resnet34", 21_797_672, Trained, 3.664),
    ("resnet50", 25_557_032, Trained, 4.089),
    ("resnet101", 44_549_160, Trained, 7.801),
    ("resnet152", 60_192_808, Trained, 11.514),
    ("resnet50v2", 25_613_800, WithStatistics, 3.482),
    ("resnet101v2", 44_675_560, WithStatistics, 7.194),
    ("resnet152v2", 60_380_648, WithStatistics, 10.907),
    ("googlenet", 6_624_904, Trained, 1.498),
    ("inceptionv3", 23_851_784, WithStatistics, 5.713),
    ("inceptionresnetv2", 55_873_736, WithStatistics, 13.156),
    ("mobilenet", 4_253_864, WithStatistics, 0.569),
    ("xception", 22_910_480, WithStatistics, 8.357),
    ("lstm", 946_625, Trained, 0.120),
    ("gpt", 826_368, Trained, 0.1185),
];

#[test]
fn parameters_and_arithmetic_are_the_published_ones() {
    assert_eq!(PUBLISHED.len(), zoo::all().len());
    let mut wrong = Vec::new();
    for (entry, (name, parameters, counted, gmacs)) in zoo::all().iter().zip(PUBLISHED) {
        assert_eq!(entry.name, name, "the table stands in the zoo's order");
        let network = Network::new(entry, Mode::Eval, 1, entry.native, entry.classes, 0.0).unwrap();
        let statistics = if counted == WithStatistics { network.state_count() } else { 0 };
        let found = network.parameter_count() + statistics;
        if found != parameters {
            wrong.push(format!("{name}: {found} parameters, published {parameters}"));
        }
        let found = network.graph.macs() as f64 / 1e9;
        if (found / gmacs - 1.0).abs() > 0.005 {
            wrong.push(format!("{name}: {found} GMACs, published {gmacs}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_model_builds_small_and_native_in_both_modes() {
    for entry in zoo::all() {
        for side in [entry.smallest.max(32), native_side(entry)] {
            let (train, eval) = (network(entry, Mode::Train, side, 10), network(entry, Mode::Eval, side, 10));
            let names = |network: &Network| network.parameters.iter().map(|p| p.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&train), names(&eval), "{}", entry.name);
            assert_eq!(train.state_count(), eval.state_count(), "{}", entry.name);
            let rows = if matches!(entry.native, Input::Tokens { .. }) { 2 * side } else { 2 };
            assert_eq!(**train.graph.shape(train.logits), [rows, 10], "{}", entry.name);
            let (_, gradients) = train.gradients.as_ref().unwrap();
            let trained = train.graph.parameters().iter().all(|&parameter| gradients.of(parameter).is_some());
            assert!(trained, "{} has a parameter without gradient", entry.name);
        }
    }
}

#[test]
fn parameter_names_are_unique() {
    for entry in zoo::all() {
        let network = network(entry, Mode::Eval, native_side(entry), 10);
        let parameters = network.parameters.iter().map(|parameter| &parameter.name);
        let mut names: Vec<&String> = parameters.chain(network.states.iter().map(|state| &state.name)).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "{}", entry.name);
    }
}

#[test]
fn the_smallest_size_is_exact() {
    for entry in zoo::all() {
        network(entry, Mode::Eval, entry.smallest, 10);
        if entry.smallest > 1 {
            let input = sized(entry.native, entry.smallest - 1);
            let smaller = Network::new(entry, Mode::Eval, 1, input, 10, 0.0);
            assert!(smaller.is_err(), "{} runs at {} too", entry.name, entry.smallest - 1);
        }
    }
}

/// A model's line in the table of `docs/models.md`.
fn row(entry: &zoo::Entry) -> String {
    let network = Network::new(entry, Mode::Eval, 1, entry.native, entry.classes, 0.0).unwrap();
    let native = match entry.native {
        Input::Image { size: [height, width], channels } => format!("{height}×{width}×{channels}"),
        Input::Tokens { sequence } => format!("{sequence} tokens"),
    };
    let (parameters, statistics) = (grouped(network.parameter_count()), grouped(network.state_count()));
    let gmacs = format!("{:.4}", network.graph.macs() as f64 / 1e9);
    let (name, classes, smallest) = (entry.name, entry.classes, entry.smallest);
    format!("| `{name}` | {classes} | {parameters} | {statistics} | {gmacs} | {native} | {smallest} |")
}

fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

#[test]
fn the_table_in_the_docs_is_true() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/models.md");
    let docs = std::fs::read_to_string(path).unwrap();
    let missing: Vec<String> = zoo::all().iter().map(row).filter(|row| !docs.contains(row.as_str())).collect();
    assert!(missing.is_empty(), "docs/models.md needs these lines:\n{}", missing.join("\n"));
}
