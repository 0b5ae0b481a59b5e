//! What must not change the numbers: threads not at all, parts of a batch only in the last digits.

use paceline_nn::Net;
use paceline_tensor::{GraphError, Value};
use paceline_train::trainer::Surroundings;
use paceline_train::{Config, Trainer};

use crate::{bits, config, train};

#[test]
fn one_thread_and_many_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let run = |threads: usize| {
        let config = Config { threads: Some(threads), clip_norm: Some(1.0), loader_threads: threads, ..config() };
        bits(train(config, &folder.path().join(threads.to_string())).unwrap().0.replica())
    };
    let one = run(1);
    assert!(run(2) == one && run(3) == one);
}

#[test]
fn another_seed_gives_other_bits() {
    let folder = tempfile::tempdir().unwrap();
    let run = |seed| {
        let config = Config { seed, ..config() };
        bits(train(config, &folder.path().join(seed.to_string())).unwrap().0.replica())
    };
    assert!(run(1) != run(2));
}

/// Without batch statistics, which see the parts; dropout does not.
fn plain(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.flatten(x)?;
    let x = net.dropout(x, 0.2)?;
    let x = net.linear("fc1", x, 16)?;
    let x = net.relu(x)?;
    let x = net.dropout(x, 0.3)?;
    net.linear("fc2", x, classes)
}

#[test]
fn a_batch_in_parts_learns_as_a_whole_one() {
    let folder = tempfile::tempdir().unwrap();
    let run = |accumulate: usize| {
        let config = Config { accumulate, ..config() };
        let path = folder.path().join(accumulate.to_string());
        let mut trainer = Trainer::start_with(&plain, config, Surroundings::default(), Some(path)).unwrap();
        trainer.run().unwrap();
        trainer.replica().store().parameters.to_vec()
    };
    let whole = run(1);
    for parts in [2, 4] {
        let parted = run(parts);
        let worst = whole.iter().zip(&parted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!((0.0..1e-5).contains(&worst), "{parts} parts differ by {worst}");
    }
}
