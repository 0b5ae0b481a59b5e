//! Runs a case of the op table on every instruction set this machine has, or on the one that `PACELINE_ISA` names, and
//! holds it against the interpreter: results and new states to 1e-5, every input's gradient to 1e-4 of central
//! differences, one and two threads bit for bit. Then once more in bf16, on operands that bf16 holds exactly, to 1e-2
//! (3e-2 where a convolution may go by tiles).

use std::sync::{Arc, OnceLock};

use paceline_system::random::{self, Random};
use paceline_tensor::device::cpu::{Cpu, isa::Isa};
use paceline_tensor::device::cuda::{self, Cuda};
use paceline_tensor::window::Conv2d;
use paceline_tensor::{
    Bf16, DType, Device, Executor, Graph, Op, Pass, Plan, Shape, Source, Store, Value, Wanted, gradient,
};

use super::array::Array;
use super::interpret;
use super::narrow::{Narrowed, rounded};

/// What an input is filled with.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Numbers in −1..1.
    Any,
    /// Odd multiples of 1/32, all different and none at a kink of ReLU, ReLU6 or a maximum.
    Distinct,
    /// Whole numbers below this.
    Ids(usize),
    /// A state with numbers in 0.5..1.5.
    State,
}

/// One row: a graph, the value that is looked at, and what its inputs are filled with.
pub struct Case {
    pub name: String,
    graph: Graph,
    output: Option<Value>,
    fills: Vec<(Value, Fill)>,
    /// Whether there is a gradient to check.
    differentiable: bool,
    /// Of results and of gradients.
    tolerances: [f64; 2],
    /// Whether the row is also checked in bf16.
    narrows: bool,
}

impl Case {
    pub fn new(name: impl Into<String>) -> Self {
        let (graph, fills, tolerances) = (Graph::new(), Vec::new(), [1e-5, 1e-4]);
        Self { name: name.into(), graph, output: None, fills, differentiable: true, tolerances, narrows: true }
    }

    /// A case of one operation.
    pub fn of(name: impl Into<String>, op: Op, inputs: &[(Fill, &[usize])]) -> Self {
        let mut case = Self::new(name);
        let inputs: Vec<Value> = inputs.iter().map(|&(fill, shape)| case.input(fill, shape)).collect();
        case.push(op, &inputs);
        case
    }

    /// The operation has no gradient, and says so.
    pub fn forward_only(mut self) -> Self {
        self.differentiable = false;
        self
    }

    /// What bf16 rounds between the operations is more than the row's tolerance.
    pub fn f32_only(mut self) -> Self {
        self.narrows = false;
        self
    }

    pub fn input(&mut self, fill: Fill, shape: &[usize]) -> Value {
        let name = format!("input {}", self.fills.len());
        let value = match fill {
            Fill::State => self.graph.state(&name, shape),
            Fill::Ids(_) => self.graph.input(&name, shape, DType::I32),
            _ => self.graph.input(&name, shape, DType::F32),
        };
        self.fills.push((value, fill));
        value
    }

    /// Appends an operation; the last one's first output is what is looked at.
    pub fn push(&mut self, op: Op, inputs: &[Value]) -> Value {
        let value = self.graph.push_one("row", op, inputs).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        self.output = Some(value);
        value
    }
}

impl Case {
    fn is_narrow(&self) -> bool {
        self.graph.values().any(|value| self.graph.dtype(value) == DType::Bf16)
    }

    /// The same in bf16, if any of its operands can be.
    fn narrowed(&self) -> Option<Self> {
        if !self.narrows {
            return None;
        }
        let narrowed = Narrowed::of(&self.graph);
        let fills: Vec<(Value, Fill)> = self.fills.iter().map(|&(value, fill)| (narrowed.at(value), fill)).collect();
        let too_many = |&(value, fill): &(Value, Fill)| {
            matches!(fill, Fill::Distinct) && narrowed.graph.shape(value).elements() > DISTINCT_MAX
        };
        if !narrowed.is_narrow() || fills.iter().any(too_many) {
            return None;
        }
        let output = self.output.map(|output| narrowed.at(output));
        let (name, differentiable) = (format!("{}, bf16", self.name), self.differentiable);
        // Convolutions by tiles round what they map once more; a test beside them bounds that noise.
        let by_tiles = |conv: &Conv2d| (conv.kernel, conv.stride, conv.dilation) == ([3, 3], [1, 1], [1, 1]);
        let mapped =
            narrowed.graph.nodes().iter().any(|node| matches!(&node.op, Op::Conv2d { conv, .. } if by_tiles(conv)));
        let tolerances = if mapped { [3e-2; 2] } else { [1e-2; 2] };
        Some(Self { name, graph: narrowed.graph, output, fills, differentiable, tolerances, narrows: false })
    }
}

/// More different numbers than this would span too many orders of magnitude in bf16.
const DISTINCT_MAX: usize = 2000;

/// Checks all rows and reports every failure, one line each.
pub fn check_all(cases: Vec<Case>) {
    let only = std::env::var_os("PACELINE_ISA").map(|_| Isa::preferred().unwrap_or_else(|error| panic!("{error}")));
    let devices: Vec<(Isa, [Device; 2])> = Isa::ALL
        .into_iter()
        .filter(|isa| isa.available() && only.is_none_or(|only| *isa == only))
        .map(|isa| (isa, [1, 2].map(|threads| Device::Cpu(Arc::new(Cpu::with_isa(threads, isa))))))
        .collect();
    let devices: Vec<(String, [Device; 2])> =
        devices.into_iter().map(|(isa, devices)| (format!("{isa:?}"), devices)).chain(gpu()).collect();
    let mut failures: Vec<String> = cases.iter().flat_map(|case| check(case, &devices)).collect();
    failures.extend(cases.iter().filter_map(Case::narrowed).flat_map(|case| check(&case, &devices)));
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// The first GPU, if there is one, twice: the same bits are expected of two runs.
pub fn gpu() -> Option<(String, [Device; 2])> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    let device = GPU.get_or_init(|| {
        cuda::count().ok().filter(|&count| count > 0)?;
        let options = cuda::Options { tf32: false, deterministic: true, tune: false };
        Some(Device::Cuda(Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}")))))
    });
    device.clone().map(|device| ("GPU".to_owned(), [device.clone(), device]))
}

fn check(case: &Case, devices: &[(String, [Device; 2])]) -> Vec<String> {
    let given: Vec<(Value, Array)> =
        case.fills.iter().map(|&(value, fill)| (value, fill_in(case, value, fill))).collect();
    let output = case.output.expect("a case has an operation");
    let values = interpret::run(&case.graph, &given);
    let dy = random_array(&case.name, u64::MAX, case.graph.shape(output));
    let dy = rounded(dy, case.graph.dtype(output));
    let work = Work::new(case, output);
    let mut wanted = vec![("the result".to_owned(), Target::All(values[output.index()].clone().expect("computed")))];
    for &(value, _) in &work.gradients {
        let name = format!("the gradient of {}", case.graph.info(value).name);
        wanted.push((name, Target::slopes(case, &given, value, &dy)));
    }
    for &state in case.graph.states() {
        let array = values[state.index()].clone().expect("states are given");
        wanted.push((format!("state {}", case.graph.info(state).name), Target::All(array)));
    }
    let mut failures = Vec::new();
    let is_shared = case.graph.nodes().iter().any(|node| matches!(node.op, Op::Together(_)));
    // What parts do together, they do on CPUs.
    for (isa, threads) in devices.iter().filter(|(_, [device, _])| !is_shared || matches!(device, Device::Cpu(_))) {
        for fused in [false, true] {
            // Of several operations, bf16 is checked where they are one: what is rounded between them differs otherwise.
            let single = case.graph.nodes().len() == 1;
            if (fused && single) || (!fused && !single && case.is_narrow()) {
                continue;
            }
            let [one, two] = [0, 1].map(|index| work.run(&threads[index], &given, &dy, fused));
            let at = format!("{}, {isa}{}", case.name, if fused { ", fused" } else { "" });
            for (((what, target), one), two) in wanted.iter().zip(&one).zip(&two) {
                failures.extend(target.mismatch(one, case.tolerances).map(|why| format!("{at}: {what}: {why}")));
                if let Some(element) = one.iter().zip(two).position(|(one, two)| one.to_bits() != two.to_bits()) {
                    let (one, two) = (one[element], two[element]);
                    failures.push(format!("{at}: {what}: element {element} is {one} on 1 thread, {two} on 2"));
                }
            }
        }
    }
    failures
}

/// The graph with its backward pass.
struct Work {
    graph: Graph,
    output: Value,
    seed: Option<Value>,
    /// Each float input and its gradient.
    gradients: Vec<(Value, Value)>,
}

impl Work {
    fn new(case: &Case, output: Value) -> Self {
        let mut graph = case.graph.clone();
        let floats = |graph: &Graph, value: Value| {
            graph.dtype(value).is_float() && matches!(graph.info(value).source, Source::Input(_))
        };
        let inputs: Vec<Value> = case.fills.iter().map(|fill| fill.0).filter(|&value| floats(&graph, value)).collect();
        let seed = graph.input("dy", graph.shape(output).clone(), graph.dtype(output));
        let gradients = gradient::differentiate(&mut graph, output, seed, &inputs);
        if !case.differentiable {
            let error = gradients.expect_err(&case.name).to_string();
            assert!(error.contains("has no gradient"), "{}: {error}", case.name);
            return Self { graph: case.graph.clone(), output, seed: None, gradients: Vec::new() };
        }
        let gradients = gradients.unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let of = |value: Value| gradients.of(value).unwrap_or_else(|| panic!("{}: a gradient is missing", case.name));
        let gradients = inputs.into_iter().map(|value| (value, of(value))).collect();
        Self { graph, output, seed: Some(seed), gradients }
    }

    /// The result, the gradients and the new states.
    fn run(&self, device: &Device, given: &[(Value, Array)], dy: &Array, fused: bool) -> Vec<Vec<f32>> {
        let mut outputs = vec![self.output];
        outputs.extend(self.gradients.iter().map(|gradient| gradient.1));
        let plan =
            Plan::new(self.graph.clone(), &Wanted { outputs: outputs.clone(), unfused: !fused, ..Wanted::default() });
        let mut store = Store::new(&plan);
        let mut executor = Executor::new(device, plan).unwrap();
        executor.poison().unwrap();
        let floats = |array: &Array| array.data.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        for (value, array) in given {
            match self.graph.info(*value).source {
                Source::State(index) => store.state_mut(index).copy_from_slice(&floats(array)),
                _ if self.graph.dtype(*value) == DType::I32 => {
                    executor.write(*value, &array.data.iter().map(|&x| x as i32).collect::<Vec<i32>>()).unwrap();
                }
                _ => executor.write(*value, &floats(array)).unwrap(),
            }
        }
        if let Some(seed) = self.seed {
            executor.write(seed, &floats(dy)).unwrap();
        }
        executor.run(&mut store, Pass::default()).unwrap();
        let mut results: Vec<Vec<f32>> = outputs.iter().map(|&output| executor.read(output).unwrap()).collect();
        results.extend((0..self.graph.states().len()).map(|index| store.state(index).to_vec()));
        results
    }
}

/// What a result is held against.
enum Target {
    /// Every element.
    All(Array),
    /// The slope of ⟨result, dy⟩ at some elements, and along some directions of ±1.
    Slopes { elements: Vec<(usize, f64)>, directions: Vec<(Vec<f64>, f64)> },
}

/// Up to this many elements of an input are moved one by one; of a larger one, some, and all together in directions.
const ELEMENTS_MAX: usize = 40;

impl Target {
    fn slopes(case: &Case, given: &[(Value, Array)], value: Value, dy: &Array) -> Self {
        let position = given.iter().position(|given| given.0 == value).expect("every input is given");
        let length = given[position].1.data.len();
        let mut random = Random::new(&[random::key_of_text(&case.name), value.index() as u64, 1]);
        let slope = |direction: &dyn Fn(usize) -> f64| {
            let eps = 1e-5;
            let loss = |side: f64| {
                let mut moved = given.to_vec();
                moved[position].1.data.iter_mut().enumerate().for_each(|(i, x)| *x += side * eps * direction(i));
                let values = interpret::run(&case.graph, &moved);
                let y = values[case.output.expect("checked").index()].as_ref().expect("computed");
                y.data.iter().zip(&dy.data).map(|(y, dy)| y * dy).sum::<f64>()
            };
            (loss(1.0) - loss(-1.0)) / (2.0 * eps)
        };
        let (all, draws) = (length <= ELEMENTS_MAX, length.min(ELEMENTS_MAX / 2));
        let chosen: Vec<usize> =
            if all { (0..length).collect() } else { (0..draws).map(|_| random.next_u64() as usize % length).collect() };
        let elements = chosen.iter().map(|&at| (at, slope(&|i| f64::from(u8::from(i == at))))).collect();
        let directions = (0..if all { 0 } else { 3 })
            .map(|_| {
                let signs: Vec<f64> = (0..length).map(|_| if random.uniform() < 0.5 { -1.0 } else { 1.0 }).collect();
                let slope = slope(&|i| signs[i]);
                (signs, slope)
            })
            .collect();
        Self::Slopes { elements, directions }
    }

    /// Why `got` is not this, naming the worst element.
    fn mismatch(&self, got: &[f32], [of_results, of_gradients]: [f64; 2]) -> Option<String> {
        match self {
            Self::All(want) => {
                assert_eq!(got.len(), want.data.len());
                worst(got.iter().zip(&want.data).map(|(&got, &want)| (f64::from(got), want)).enumerate(), of_results)
            }
            Self::Slopes { elements, directions } => {
                let pairs = elements.iter().map(|&(at, want)| (at, (f64::from(got[at]), want)));
                let scale = got.iter().fold(1e-3f64, |scale, &x| scale.max(f64::from(x).abs()));
                let along = directions.iter().enumerate().find_map(|(number, (signs, want))| {
                    let got: f64 = got.iter().zip(signs).map(|(&got, sign)| f64::from(got) * sign).sum();
                    let off = (got - want).abs() / (scale * (signs.len() as f64).sqrt());
                    (off.is_nan() || off > of_gradients)
                        .then(|| format!("along direction {number} it is {got}, should be {want} (off by {off:.1e})"))
                });
                worst(pairs, of_gradients).or(along)
            }
        }
    }
}

/// The pair that is furthest apart, if by more than `tolerance` of the largest magnitude.
fn worst(pairs: impl Iterator<Item = (usize, (f64, f64))>, tolerance: f64) -> Option<String> {
    let pairs: Vec<_> = pairs.collect();
    let scale = pairs.iter().fold(1e-3f64, |scale, (_, (_, want))| scale.max(want.abs()));
    let distance = |&(_, (got, want)): &(usize, (f64, f64))| {
        let distance = (got - want).abs() / scale;
        if distance.is_nan() { f64::INFINITY } else { distance }
    };
    let worst = pairs.iter().max_by(|a, b| distance(a).total_cmp(&distance(b)))?;
    let (off, (element, (got, want))) = (distance(worst), *worst);
    (off > tolerance).then(|| format!("element {element} is {got}, should be {want} (off by {off:.1e})"))
}

fn fill_in(case: &Case, value: Value, fill: Fill) -> Array {
    let shape = case.graph.shape(value);
    let dtype = case.graph.dtype(value);
    let array = rounded(random_array(&case.name, value.index() as u64, shape), dtype);
    match fill {
        Fill::Any => array,
        Fill::State => array.map(|x| 1.0 + x / 2.0),
        Fill::Ids(count) => array.map(|x| ((x + 1.0) / 2.0 * count as f64).floor().min(count as f64 - 1.0)),
        Fill::Distinct => {
            let mut order: Vec<usize> = (0..array.data.len()).collect();
            order.sort_by(|&a, &b| array.data[a].total_cmp(&array.data[b]));
            let mut distinct = array;
            let middle = order.len() as f64 / 2.0;
            for (rank, &element) in order.iter().enumerate() {
                let number = rank as f64 - middle.floor();
                distinct.data[element] =
                    if dtype == DType::Bf16 { ladder(number) } else { (2.0 * number + 1.0) / 32.0 };
            }
            distinct
        }
    }
}

/// Different numbers of bf16 from ±1/32 on, none of them 6, where ReLU6 has a kink.
fn ladder(number: f64) -> f64 {
    let (first, six) = (Bf16::from_f32(1.0 / 32.0).to_bits(), Bf16::from_f32(6.0).to_bits());
    let step = if number < 0.0 { -1.0 - number } else { number };
    let bits = first + step as u16;
    let value = f64::from(Bf16::from_bits(bits + u16::from(bits >= six)).to_f32());
    if number < 0.0 { -value } else { value }
}

/// Numbers in −1..1 that an f32 holds exactly.
fn random_array(name: &str, stream: u64, shape: &Shape) -> Array {
    let mut random = Random::new(&[random::key_of_text(name), stream]);
    Array::new(shape, (0..shape.elements()).map(|_| f64::from(2.0 * random.uniform() - 1.0)).collect())
}
