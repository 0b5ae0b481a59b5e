//! Dropout: what is kept, and that the mask is the same again in the gradient, on more threads and in another run.

use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Store, Wanted, gradient};

/// Dropout of `count` ones at one step, and the gradient of ones.
fn dropout((probability, salt): (f32, u64), pass: Pass, count: usize, threads: usize) -> [Vec<f32>; 2] {
    let mut graph = Graph::new();
    let x = graph.input("x", [count], DType::F32);
    let y = graph.push_one("dropout", Op::Dropout { probability, salt }, &[x]).expect("fits");
    let dy = graph.input("dy", [count], DType::F32);
    let dx = gradient::differentiate(&mut graph, y, dy, &[x]).expect("has a gradient").of(x).expect("was asked for");
    let plan = Plan::new(graph, &Wanted { outputs: vec![y, dx], ..Wanted::default() });
    let (mut store, mut executor) = (Store::new(&plan), Executor::new(&Device::cpu(threads), plan));
    executor.write(x, &vec![1.0f32; count]);
    executor.write(dy, &vec![1.0f32; count]);
    executor.run(&mut store, pass);
    [executor.read(y), executor.read(dx)]
}

#[test]
fn dropout_keeps_the_mean_and_its_gradient_drops_the_same_elements() {
    let (count, pass) = (60_000, Pass { seed: 11, step: 4 });
    for probability in [0.0, 0.1, 0.5, 0.9] {
        let [y, dx] = dropout((probability, 3), pass, count, 1);
        assert_eq!(y, dx, "the same mask at {probability}");
        assert_eq!([y.clone(), dx], dropout((probability, 3), pass, count, 2), "the same on two threads");
        let kept = 1.0 / (1.0 - probability);
        assert!(y.iter().all(|&y| y == 0.0 || (y - kept).abs() < 1e-5), "an element is dropped or grown");
        let dropped = y.iter().filter(|&&y| y == 0.0).count() as f32 / count as f32;
        assert!((dropped - probability).abs() < 0.01, "{dropped} instead of {probability}");
        let mean = y.iter().sum::<f32>() / count as f32;
        assert!((mean - 1.0).abs() < 0.04, "the mean became {mean}");
    }
}

#[test]
fn the_mask_is_a_function_of_seed_step_and_salt() {
    let mask = |seed, step, salt| dropout((0.5, salt), Pass { seed, step }, 10_000, 1);
    let base = mask(1, 1, 1);
    assert_eq!(base, mask(1, 1, 1));
    for other in [mask(1, 2, 1), mask(2, 1, 1), mask(1, 1, 2)] {
        let agree = base[0].iter().zip(&other[0]).filter(|(a, b)| a == b).count();
        assert!((4_700..5_300).contains(&agree), "{agree} of 10000 elements agree");
    }
}
