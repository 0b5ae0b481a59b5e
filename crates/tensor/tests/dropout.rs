//! Dropout: what is kept, and that the mask is the same again in the gradient, on more threads, on a GPU, in another run, and however
//! a batch is divided.

use std::io::Write;
use std::sync::Arc;

use paceline_tensor::device::cuda::{self, Cuda, Options};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Store, Wanted, gradient};

/// A layer and the tensor it sees.
#[derive(Clone, Copy)]
struct Layer {
    probability: f32,
    salt: u64,
    shape: [usize; 2],
    dtype: DType,
}

impl Layer {
    fn half(salt: u64, shape: [usize; 2]) -> Self {
        Self { probability: 0.5, salt, shape, dtype: DType::F32 }
    }

    /// What becomes of ones, and the gradient of ones.
    fn run(self, pass: Pass, device: &Device) -> [Vec<f32>; 2] {
        let Self { probability, salt, shape, dtype } = self;
        let mut graph = Graph::new();
        let x = graph.input("x", shape, dtype);
        let y = graph.push_one("dropout", Op::Dropout { probability, salt, within: None }, &[x]).expect("fits");
        let dy = graph.input("dy", shape, dtype);
        let dx = gradient::differentiate(&mut graph, y, dy, &[x]).expect("differentiable").of(x).expect("asked for");
        let plan = Plan::new(graph, &Wanted { outputs: vec![y, dx], ..Wanted::default() });
        let (mut store, mut executor) = (Store::new(&plan), Executor::new(device, plan).unwrap());
        let ones = vec![1.0f32; shape[0] * shape[1]];
        executor.write(x, &ones).unwrap();
        executor.write(dy, &ones).unwrap();
        executor.run(&mut store, pass).unwrap();
        [executor.read(y).unwrap(), executor.read(dx).unwrap()]
    }
}

const STEP: Pass = Pass { seed: 11, step: 4, first_sample: 0, samples: 0 };

#[test]
fn dropout_keeps_the_mean_and_its_gradient_drops_the_same_elements() {
    let count = 60_000;
    for probability in [0.0, 0.1, 0.5, 0.9] {
        let layer = Layer { probability, ..Layer::half(3, [count, 1]) };
        let [y, dx] = layer.run(STEP, &Device::cpu(1));
        assert_eq!(y, dx, "the same mask at {probability}");
        assert_eq!([y.clone(), dx], layer.run(STEP, &Device::cpu(2)), "the same on two threads");
        let kept = 1.0 / (1.0 - probability);
        assert!(y.iter().all(|&y| y == 0.0 || (y - kept).abs() < 1e-5), "an element is dropped or grown");
        let dropped = y.iter().filter(|&&y| y == 0.0).count() as f32 / count as f32;
        assert!((dropped - probability).abs() < 0.01, "{dropped} instead of {probability}");
        let mean = y.iter().sum::<f32>() / count as f32;
        assert!((mean - 1.0).abs() < 0.04, "the mean became {mean}");
    }
}

#[test]
fn the_mask_is_a_function_of_seed_step_salt_and_sample() {
    let device = Device::cpu(1);
    let mask = |pass: Pass, salt| Layer::half(salt, [2, 5_000]).run(Pass { samples: 2, ..pass }, &device);
    let base = mask(STEP, 1);
    assert_eq!(base, mask(STEP, 1));
    let others = [
        mask(Pass { step: 5, ..STEP }, 1),
        mask(Pass { seed: 12, ..STEP }, 1),
        mask(STEP, 2),
        mask(Pass { first_sample: 2, ..STEP }, 1),
    ];
    let agree = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a == b).count();
    for other in others {
        let agree = agree(&base[0], &other[0]);
        assert!((4_700..5_300).contains(&agree), "{agree} of 10000 elements agree");
    }
    let (first, second) = base[0].split_at(5_000);
    let agree = agree(first, second);
    assert!((2_300..2_700).contains(&agree), "{agree} of 5000 elements of two samples agree");
}

/// The parts of a batch, of so many samples each, one after the other have the mask of the whole; so have all devices.
fn parts_have_the_mask_of_the_whole(devices: &[Device], sizes: &[usize], elements: usize, first: u64) {
    let samples = sizes.iter().sum();
    for dtype in [DType::F32, DType::Bf16] {
        let layer = |samples| Layer { dtype, ..Layer::half(2, [samples, elements]) };
        let whole = layer(samples).run(Pass { first_sample: first, samples, ..STEP }, &devices[0]);
        for device in devices {
            let (mut parts, mut first_sample) = ([Vec::new(), Vec::new()], first);
            for &samples in sizes {
                let part = layer(samples).run(Pass { first_sample, samples, ..STEP }, device);
                parts.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
                first_sample += samples as u64;
            }
            assert!(parts == whole, "{sizes:?} of {elements} from {first} in {dtype:?} on {device:?}");
        }
    }
}

fn divisions(devices: &[Device]) {
    for sizes in [&[3, 4][..], &[1, 5, 1], &[7]] {
        for elements in [1, 13, 1_001, 40_000] {
            parts_have_the_mask_of_the_whole(devices, sizes, elements, 0);
            parts_have_the_mask_of_the_whole(devices, sizes, elements, 5);
        }
    }
    // An element in the middle of a part has the index 2³².
    let first = (1u64 << 32) / 1_001 - 2;
    parts_have_the_mask_of_the_whole(devices, &[4, 3], 1_001, first);
}

#[test]
fn a_batch_in_parts_has_the_mask_of_the_whole_batch() {
    divisions(&[Device::cpu(1), Device::cpu(2)]);
}

#[test]
fn a_gpu_has_the_mask_of_the_cpu() {
    if cuda::count().is_ok_and(|count| count > 0) {
        let options = Options { tf32: false, deterministic: true, tune: false };
        let cuda = Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"));
        divisions(&[Device::cpu(1), Device::Cuda(Arc::new(cuda))]);
    } else {
        let _ = writeln!(std::io::stderr(), "skipped: a_gpu_has_the_mask_of_the_cpu: no GPU");
    }
}
