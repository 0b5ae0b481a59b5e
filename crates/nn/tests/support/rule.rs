//! The numbers of the fixtures: weights, inputs and dot vectors made from names. The other half of this rule is
//! `tools/fixtures.py`, which says why it is so; the two change together.

use std::collections::{BTreeMap, HashSet};

use paceline_nn::{Network, Parameter, State};
use paceline_system::random::{at, key_of_text};
use paceline_tensor::execute::Executor;
use paceline_tensor::store::Store;
use paceline_tensor::{DType, Value};

/// What `tools/fixtures.py` calls `RULE`.
#[allow(dead_code)]
pub const VERSION: u32 = 1;

/// Biases that are not of their name's stream but of a later one, by number: `tools/fixtures.py` draws some again, so
/// that no ReLU stands near its kink.
pub type Redrawn = BTreeMap<String, u32>;

/// A 64-bit draw as a number in [-1, 1).
fn signed(word: u64) -> f32 {
    (word >> 40) as f32 / 8_388_608.0 - 1.0
}

/// `count` numbers in [-1, 1) of the stream called `name`.
pub fn uniform(name: &str, count: usize) -> impl Iterator<Item = f32> + use<> {
    let key = key_of_text(name);
    (0..count as u64).map(move |index| signed(at(key, index)))
}

/// `count` whole numbers below `bound` of the stream called `name`.
pub fn below(name: &str, count: usize, bound: usize) -> Vec<usize> {
    let key = key_of_text(name);
    (0..count as u64).map(|index| (at(key, index) % bound as u64) as usize).collect()
}

/// A tensor's centre and spread; `names` are those of all tensors of the model.
fn spread(name: &str, foreign_shape: &[usize], names: &HashSet<&str>) -> (f32, f32) {
    if let [_, inputs @ ..] = foreign_shape
        && !inputs.is_empty()
    {
        return (0.0, (6.0 / inputs.iter().product::<usize>() as f64).sqrt() as f32);
    }
    let (layer, kind) = name.rsplit_once('.').unwrap_or(("", name));
    let known = |layer: &str, kind: &str| names.contains(format!("{layer}.{kind}").as_str());
    if !known(layer, "running_mean") {
        return if kind == "weight" { (1.0, 0.1) } else { (0.0, 0.1) };
    }
    let last = [".bn3", ".downsample.1", "_sepconv3_bn"].iter().any(|end| layer.ends_with(end))
        || layer.strip_suffix(".bn2").is_some_and(|block| !known(&format!("{block}.bn3"), "weight"));
    match kind {
        "weight" => (if last { 0.3 } else { 0.5 }, 0.1),
        "bias" if last => (0.0, 0.1),
        "bias" => (if known(layer, "weight") { 1.0 } else { 2.5 }, 0.1),
        "running_var" => (1.0, 0.2),
        _ => (0.0, 0.1),
    }
}

fn tensor(name: &str, foreign_shape: &[usize], names: &HashSet<&str>, redrawn: &Redrawn) -> Vec<f32> {
    let (centre, spread) = spread(name, foreign_shape, names);
    let stream = redrawn.get(name).map_or_else(|| name.to_owned(), |number| format!("{name}:{number}"));
    uniform(&stream, foreign_shape.iter().product()).map(|draw| centre + spread * draw).collect()
}

/// Fills a network's parameters and states by their names.
pub fn fill(parameters: &[Parameter], states: &[State], redrawn: &Redrawn, store: &mut Store) {
    let parameter_names = parameters.iter().map(|parameter| parameter.name.as_str());
    let names: HashSet<&str> = parameter_names.chain(states.iter().map(|state| state.name.as_str())).collect();
    for (index, parameter) in parameters.iter().enumerate() {
        let foreign = tensor(&parameter.name, &parameter.layout.foreign_shape(&parameter.shape), &names, redrawn);
        store.parameter_mut(index).copy_from_slice(&parameter.layout.to_native(&parameter.shape, &foreign));
    }
    for (index, state) in states.iter().enumerate() {
        store.state_mut(index).copy_from_slice(&tensor(&state.name, &state.shape, &names, redrawn));
    }
}

/// The ends of a network that a batch is written to.
#[derive(Clone, Copy)]
pub struct Ends {
    x: Value,
    targets: Value,
    classes: usize,
}

impl Ends {
    pub fn of(network: &Network) -> Self {
        let classes = network.graph.shape(network.logits).last();
        Self { x: network.x, targets: network.targets, classes }
    }

    /// Writes the batch that the fixtures call `draw`.
    pub fn write(self, executor: &mut Executor, draw: &str) {
        let elements = |value: Value| executor.plan().graph().shape(value).elements();
        let (size, rows) = (elements(self.x), elements(self.targets));
        let whole = |name: &str, count| -> Vec<i32> {
            below(&format!("{name}{draw}"), count, self.classes).into_iter().map(|number| number as i32).collect()
        };
        if executor.plan().graph().dtype(self.x) == DType::I32 {
            executor.write(self.x, &whole("x", size)).unwrap();
        } else {
            let root = 3.0f64.sqrt() as f32;
            let pixels: Vec<f32> = uniform(&format!("x{draw}"), size).map(|draw| root * draw).collect();
            executor.write(self.x, &pixels).unwrap();
        }
        executor.write(self.targets, &whole("targets", rows)).unwrap();
    }
}
