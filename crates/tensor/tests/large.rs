//! What goes another way on a GPU than the op table's small rows: batch-norms of matrices that are larger than its cache, and convolutions of
//! few channels whose blocks have several stages. Held against the CPU, which the op table holds against the interpreter. And a plan that is
//! too large for any GPU. Without a GPU the tests say that they are skipped.

use std::io::Write;
use std::sync::Arc;

use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{self, Cuda};
use paceline_tensor::op::{BatchNorm, Rectifier};
use paceline_tensor::window::{Conv2d, Padding};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Store, Value, Wanted, gradient};

/// 137 MB, and neither rows nor channels divide evenly.
const SHAPE: [usize; 2] = [33_001, 1_036];

/// The CPU and the first GPU; none, which is said, where there is no GPU.
fn devices(test: &str) -> Option<[Device; 2]> {
    if !cuda::count().is_ok_and(|count| count > 0) {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: no GPU");
        return None;
    }
    let options = cuda::Options { tf32: false, deterministic: true, tune: false };
    Some([Device::Cpu(Arc::new(Cpu::new(4))), Device::Cuda(Arc::new(Cuda::new(0, options).unwrap()))])
}

/// The length of the difference in lengths of what is expected.
fn apart(expected: &[f32], found: &[f32]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = expected.iter().zip(found).map(|(a, b)| square(a - b)).sum();
    (difference / expected.iter().map(|&a| square(a)).sum::<f64>()).sqrt()
}

/// The result, the gradients of x, of the shift and of the scale, and the new states.
fn run(device: &Device, given: &[Vec<f32>], residual: bool) -> Vec<Vec<f32>> {
    let (mut graph, channels) = (Graph::new(), [SHAPE[1]]);
    let x = graph.input("x", SHAPE, DType::F32);
    let [beta, gamma] = ["beta", "gamma"].map(|name| graph.input(name, channels, DType::F32));
    let [mean, variance] = ["mean", "variance"].map(|name| graph.state(name, channels));
    let added = residual.then(|| graph.input("added", SHAPE, DType::F32));
    // Without a ReLU, since among so many numbers some would lie on different sides of its kink.
    let rectifier = Rectifier::None;
    let norm = BatchNorm { epsilon: 1e-3, momentum: 0.2, scale: true, residual: false, rectifier, moments: false };
    let mut y = graph.push_one("norm", Op::BatchNorm(norm), &[x, beta, mean, variance, gamma]).unwrap();
    if let Some(added) = added {
        y = graph.push_one("sum", Op::Add, &[y, added]).unwrap();
    }
    let seed = graph.input("dy", SHAPE, DType::F32);
    let wanted: Vec<Value> = [x, beta, gamma].into_iter().chain(added).collect();
    let gradients = gradient::differentiate(&mut graph, y, seed, &wanted).unwrap();
    let outputs: Vec<Value> = [y].into_iter().chain(wanted.iter().map(|&value| gradients.of(value).unwrap())).collect();
    let plan = Plan::new(graph, &Wanted { outputs: outputs.clone(), ..Wanted::default() });
    let mut store = Store::new(&plan);
    let mut executor = Executor::new(device, plan).unwrap();
    executor.poison().unwrap();
    for (value, numbers) in [x, beta, gamma, seed].into_iter().chain(added).zip(given) {
        executor.write(value, numbers).unwrap();
    }
    executor.run(&mut store, Pass::default()).unwrap();
    let mut results: Vec<Vec<f32>> = outputs.iter().map(|&output| executor.read(output).unwrap()).collect();
    results.extend((0..2).map(|index| store.state(index).to_vec()));
    results
}

#[test]
fn large_batch_norms_on_a_gpu_are_those_of_the_cpu() {
    let Some(devices) = devices("large_batch_norms_on_a_gpu_are_those_of_the_cpu") else { return };
    let mut random = Random::new(&[7]);
    let elements = SHAPE[0] * SHAPE[1];
    let mut numbers =
        |count: usize, from: f32| (0..count).map(|_| random.range(from, from + 1.0)).collect::<Vec<f32>>();
    let mut given = vec![numbers(elements, 1.5), numbers(SHAPE[1], -0.5), numbers(SHAPE[1], 0.5)];
    given.extend([numbers(elements, -0.5), numbers(elements, -0.5)]);
    for residual in [false, true] {
        let [expected, found] = [0, 1].map(|index: usize| run(&devices[index], &given, residual));
        for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let apart = apart(expected, found);
            assert!(apart < 1e-5, "residual {residual}, result {number}: {apart:e} apart");
        }
    }
}

/// Rows so long that a stage of a pass has one image and one of the weights' gradient two: on the 132 multiprocessors of an H200, every block
/// has three stages, one more than have room at a time.
const IMAGES: [usize; 4] = [600, 1, 172, 16];

/// The result of a convolution by 3×3 to as many channels, and the gradients of images and weights.
fn convolve(device: &Device, given: &[Vec<f32>; 3], dtype: DType) -> Vec<Vec<f32>> {
    let mut graph = Graph::new();
    let x = graph.input("x", IMAGES, dtype);
    let weight = graph.input("weight", [3, 3, IMAGES[3], IMAGES[3]], DType::F32);
    let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
    let op = Op::Conv2d { conv, bias: false, relu: false, moments: false };
    let y = graph.push_one("conv", op, &[x, weight]).unwrap();
    let seed = graph.input("dy", IMAGES, dtype);
    let gradients = gradient::differentiate(&mut graph, y, seed, &[x, weight]).unwrap();
    let outputs = vec![y, gradients.of(x).unwrap(), gradients.of(weight).unwrap()];
    let plan = Plan::new(graph, &Wanted { outputs: outputs.clone(), ..Wanted::default() });
    let mut store = Store::new(&plan);
    let mut executor = Executor::new(device, plan).unwrap();
    executor.poison().unwrap();
    [x, weight, seed].into_iter().zip(given).for_each(|(value, numbers)| executor.write(value, &numbers[..]).unwrap());
    executor.run(&mut store, Pass::default()).unwrap();
    outputs.iter().map(|&output| executor.read(output).unwrap()).collect()
}

/// On numbers that bf16 holds exactly, so that only results are rounded, by less than 0.4% each.
#[test]
fn convolutions_of_many_stages_on_a_gpu_are_those_of_the_cpu() {
    let Some([cpu, gpu]) = devices("convolutions_of_many_stages_on_a_gpu_are_those_of_the_cpu") else { return };
    let mut random = Random::new(&[8]);
    let images = IMAGES.iter().product();
    let given = [images, 9 * IMAGES[3] * IMAGES[3], images]
        .map(|count: usize| (0..count).map(|_| (random.range(-1.0, 1.0) * 128.0).round() / 128.0).collect());
    let (expected, found) = (convolve(&cpu, &given, DType::F32), convolve(&gpu, &given, DType::Bf16));
    for (name, (expected, found)) in
        ["result", "images' gradient", "weights' gradient"].iter().zip(expected.iter().zip(&found))
    {
        let apart = apart(expected, found);
        assert!(apart < 4e-3, "the {name}: {apart:e} apart");
    }
}

#[test]
fn a_plan_that_a_gpu_has_no_memory_for_is_an_error() {
    let Some([_, gpu]) = devices("a_plan_that_a_gpu_has_no_memory_for_is_an_error") else { return };
    // 16 TiB in the arena, twice.
    let mut graph = Graph::new();
    let x = graph.input("x", [1 << 21, 1 << 21], DType::F32);
    let y = graph.push_one("half", Op::Scale(0.5), &[x]).unwrap();
    let plan = Plan::new(graph, &Wanted { outputs: vec![y], ..Wanted::default() });
    let mut late = Executor::without_arena(&gpu, plan.clone());
    assert!(Executor::new(&gpu, plan.clone()).is_err());
    assert!(late.run(&mut Store::new(&plan), Pass::default()).is_err());
}
