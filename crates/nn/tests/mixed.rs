//! Every model in bf16 against itself in f32: the loss, the direction of the gradient, the memory, and where types change.

#[path = "support/families.rs"]
mod families;
#[path = "support/rule.rs"]
mod rule;

use paceline_nn::zoo::{self, Entry};
use paceline_nn::{Input, Mode, Model, Net, Network};
use paceline_tensor::execute::{Executor, Pass};
use paceline_tensor::store::Store;
use paceline_tensor::{DType, Device, GraphError, Plan, Precision, Value, Wanted};

/// A model without its dropout layers.
struct Certain(&'static Entry);

impl Model for Certain {
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        net.without_dropout();
        self.0.build(net, x, classes)
    }
}

fn network(entry: &'static Entry, batch: usize) -> Network {
    let input = match entry.native {
        Input::Image { channels, .. } => Input::Image { size: [entry.smallest.max(32); 2], channels },
        Input::Tokens { .. } => Input::Tokens { sequence: 16 },
    };
    Network::new(&Certain(entry), Mode::Train, batch, input, 10, 0.0).unwrap()
}

/// Loss and gradients of one step.
fn step(entry: &'static Entry, precision: Precision) -> (f64, Vec<f32>) {
    let network = network(entry, 8);
    let wanted = Wanted { precision, ..network.wanted(1 << 22) };
    let (ends, seed) = (rule::Ends::of(&network), network.gradients.as_ref().unwrap().0);
    let plan = Plan::new(network.graph, &wanted);
    let mut store = Store::new(&plan);
    let mut executor = Executor::new(&Device::cpu(2), plan).unwrap();
    executor.poison().unwrap();
    rule::fill(&network.parameters, &network.states, &rule::Redrawn::new(), &mut store);
    ends.write(&mut executor, ":0");
    executor.write(seed, &[1.0f32]).unwrap();
    executor.run(&mut store, Pass::default()).unwrap();
    let gradients = (0..network.parameters.len()).flat_map(|index| store.gradient(index).to_vec()).collect();
    (f64::from(executor.read::<f32>(network.loss).unwrap()[0]), gradients)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Models whose gradient is not mostly what rounding makes of it: not so deep that batch-norms over a few pixels, one upon
/// the other, turn a last digit into a first one.
const CALM: [&str; 19] = [
    "mlp",
    "lenet5",
    "cnn5",
    "resnet9",
    "resnet20",
    "alexnet",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "vgg11_bn",
    "vgg13_bn",
    "vgg16_bn",
    "vgg19_bn",
    "inceptionv3",
    "mobilenet",
    "xception",
    "lstm",
    "gpt",
];

#[test]
fn the_loss_and_the_gradient_of_every_family_are_those_of_f32() {
    are_those_of_f32(families::models(true));
}

#[test]
#[ignore = "cargo x ci: mixed"]
fn the_loss_and_the_gradient_of_every_model_are_those_of_f32() {
    are_those_of_f32(families::models(false));
}

fn are_those_of_f32(models: impl Iterator<Item = &'static Entry>) {
    let mut complaints = Vec::new();
    for entry in models {
        let (full, narrow) = (step(entry, Precision::F32), step(entry, Precision::Bf16));
        let (off, along) = ((narrow.0 / full.0 - 1.0).abs(), cosine(&full.1, &narrow.1));
        // Convolutions by tiles round what they map as well: with direct sums alone these are 0.99 and 0.75.
        let least = if CALM.contains(&entry.name) { 0.98 } else { 0.65 };
        if off.is_nan() || off > 0.02 || along.is_nan() || along < least {
            complaints.push(format!("{}: loss {} instead of {}, cosine {along}", entry.name, narrow.0, full.0));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn from_the_image_to_the_logits_there_is_one_cast_and_half_the_memory() {
    for entry in zoo::all().iter().filter(|entry| matches!(entry.native, Input::Image { .. })) {
        let plan = |precision| {
            let network = network(entry, 8);
            let wanted = Wanted { precision, ..network.wanted(1 << 22) };
            Plan::new(network.graph, &wanted)
        };
        let [full, narrow] = [Precision::F32, Precision::Bf16].map(plan);
        let (graph, name) = (narrow.graph(), entry.name);
        let casts = graph.nodes().iter().filter(|node| node.op.name() == "cast").count();
        // A product takes the image as it is, and gives the logits as f32; mobilenet ends in a convolution, which does not.
        let expected = match name {
            "mlp" => 0,
            "mobilenet" => 3,
            _ => 1,
        };
        assert_eq!(casts, expected, "{name}");
        for node in graph.nodes().iter().filter(|node| node.op.name().starts_with("batch_norm")) {
            assert_eq!(graph.dtype(node.outputs[0]), DType::Bf16, "{name}: {}", node.layer);
        }
        // The winners of maxima are integers, and all that the backward pass reads of a layer before a maximum: they are not counted.
        // In the arena they keep their four bytes, as the image does.
        let winners = |plan: &Plan| -> usize {
            let graph = plan.graph();
            let outputs = graph.nodes().iter().flat_map(|node| &node.outputs);
            outputs
                .map(|&output| graph.info(output))
                .filter(|info| info.dtype == DType::I32)
                .map(|info| info.bytes())
                .sum()
        };
        let share = |bytes: &dyn Fn(&Plan) -> usize| bytes(&narrow) as f64 / bytes(&full) as f64;
        let shares = [share(&|plan| plan.activation_bytes() - winners(plan)), share(&Plan::arena_bytes)];
        let fits = (0.45..0.75).contains(&shares[0]) && (0.45..0.8).contains(&shares[1]);
        assert!(name == "mlp" || fits, "{name}: {shares:?}");
    }
}
