//! Batch-norms of matrices that are larger than a GPU's cache, which go another way there than small ones: held against the CPU, which the op
//! table holds against the interpreter. Without a GPU the test says that it is skipped.

use std::io::Write;
use std::sync::Arc;

use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{self, Cuda};
use paceline_tensor::op::{BatchNorm, Rectifier};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Store, Value, Wanted, gradient};

/// 137 MB, and neither rows nor channels divide evenly.
const SHAPE: [usize; 2] = [33_001, 1_036];

/// The result, the gradients of x, of the shift and of the scale, and the new states.
fn run(device: &Device, given: &[Vec<f32>], residual: bool) -> Vec<Vec<f32>> {
    let (mut graph, channels) = (Graph::new(), [SHAPE[1]]);
    let x = graph.input("x", SHAPE, DType::F32);
    let [beta, gamma] = ["beta", "gamma"].map(|name| graph.input(name, channels, DType::F32));
    let [mean, variance] = ["mean", "variance"].map(|name| graph.state(name, channels));
    let added = residual.then(|| graph.input("added", SHAPE, DType::F32));
    let norm =
        BatchNorm { epsilon: 1e-3, momentum: 0.2, scale: true, residual, rectifier: Rectifier::Relu, moments: false };
    let inputs: Vec<Value> = [x, beta, mean, variance, gamma].into_iter().chain(added).collect();
    let y = graph.push("norm", Op::BatchNorm(norm), &inputs).unwrap()[0];
    let seed = graph.input("dy", SHAPE, DType::F32);
    let wanted: Vec<Value> = [x, beta, gamma].into_iter().chain(added).collect();
    let gradients = gradient::differentiate(&mut graph, y, seed, &wanted).unwrap();
    let outputs: Vec<Value> = [y].into_iter().chain(wanted.iter().map(|&value| gradients.of(value).unwrap())).collect();
    let plan = Plan::new(graph, &Wanted { outputs: outputs.clone(), ..Wanted::default() });
    let mut store = Store::new(&plan);
    let mut executor = Executor::new(device, plan);
    executor.poison();
    for (value, numbers) in [x, beta, gamma, seed].into_iter().chain(added).zip(given) {
        executor.write(value, numbers);
    }
    executor.run(&mut store, Pass::default());
    let mut results: Vec<Vec<f32>> = outputs.iter().map(|&output| executor.read(output)).collect();
    results.extend((0..2).map(|index| store.state(index).to_vec()));
    results
}

#[test]
fn large_batch_norms_on_a_gpu_are_those_of_the_cpu() {
    if !cuda::count().is_ok_and(|count| count > 0) {
        let _ = writeln!(std::io::stderr(), "skipped: large_batch_norms_on_a_gpu_are_those_of_the_cpu: no GPU");
        return;
    }
    let options = cuda::Options { tf32: false, deterministic: true, tune: false };
    let devices = [Device::Cpu(Arc::new(Cpu::new(4))), Device::Cuda(Arc::new(Cuda::new(0, options).unwrap()))];
    let mut random = Random::new(&[7]);
    let elements = SHAPE[0] * SHAPE[1];
    let mut numbers =
        |count: usize, from: f32| (0..count).map(|_| random.range(from, from + 1.0)).collect::<Vec<f32>>();
    let mut given = vec![numbers(elements, 1.5), numbers(SHAPE[1], -0.5), numbers(SHAPE[1], 0.5)];
    given.extend([numbers(elements, -0.5), numbers(elements, -0.5)]);
    for residual in [false, true] {
        let [expected, found] = [0, 1].map(|index: usize| run(&devices[index], &given, residual));
        for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let square = |x: f32| f64::from(x) * f64::from(x);
            let apart: f64 = expected.iter().zip(found).map(|(a, b)| square(a - b)).sum();
            let apart = (apart / expected.iter().map(|&a| square(a)).sum::<f64>()).sqrt();
            assert!(apart < 1e-5, "residual {residual}, result {number}: {apart:e} apart");
        }
    }
}
