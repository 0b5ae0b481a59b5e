//! Updates during the backward pass: the same bits as at its end, and a gradient that is no number stops them.

use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::layer::{Conv, Window};
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, Model, Net};
use paceline_system::clock::Clock;
use paceline_system::phase::Phase;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::{GraphError, MemoryUse, Pass, Precision, Value};
use paceline_train::engine::{Gradients, Inputs, Slot, StepOutput, Unheard};
use paceline_train::micro_batch::MicroBatch;
use paceline_train::phases::Phases;
use paceline_train::replica::{NotFinite, Replica, ReplicaOptions};

use crate::bits;

const INPUT: Input = Input::Image { size: [8, 8], channels: 3 };

/// Batch statistics, a residual, dropout, and a matrix large enough to be a bucket of its own.
fn varied(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(8, 3).pad(1))?;
    let x = net.batch_norm("norm1", x)?;
    let x = net.relu(x)?;
    let y = net.conv("conv2", x, Conv::new(8, 3).pad(1))?;
    let y = net.batch_norm("norm2", y)?;
    let x = net.add(x, y)?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.flatten(x)?;
    let x = net.linear("fc1", x, 1100)?;
    let x = net.relu(x)?;
    let x = net.dropout(x, 0.3)?;
    let x = net.linear("fc2", x, 1000)?;
    let x = net.relu(x)?;
    net.linear("fc3", x, classes)
}

fn replica(model: &dyn Model, optimizer: Optimizer, clip_norm: Option<f64>, micro_batch: usize) -> Replica {
    replica_with(model, (optimizer, clip_norm), micro_batch, Precision::F32, MemoryUse::Normal)
}

fn replica_with(
    model: &dyn Model,
    (optimizer, clip_norm): (Optimizer, Option<f64>),
    micro_batch: usize,
    precision: Precision,
    memory: MemoryUse,
) -> Replica {
    let hyper = HyperParameters { weight_decay: Some(0.01), ..HyperParameters::default() };
    let rule = optimizer.rule(&hyper).unwrap();
    let (classes, accumulate, smoothing, seed) = (10, 1, 0.1, 7);
    let input = INPUT;
    let options = ReplicaOptions {
        input,
        classes,
        micro_batch,
        other_sizes: Default::default(),
        accumulate,
        smoothing,
        seed,
        rule,
        precision,
        memory,
        clip_norm,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        slots: 0,
        shard: None,
    };
    Replica::new(model, options, &Arc::new(Cpu::new(2))).unwrap()
}

fn batch(size: usize, seed: u64) -> Batch {
    let mut random = Random::new(&[seed]);
    let images = (0..size * 8 * 8 * 3).map(|_| random.normal()).collect();
    let targets = (0..size).map(|_| random.below(10) as i32).collect();
    Batch { size, images, targets, ..Batch::default() }
}

fn step(replica: &mut Replica, batch: &Batch, moment: Moment) -> Result<(), NotFinite> {
    let clock = Clock::real();
    let mut phases = Phases::start(&clock);
    let StepOutput { updated, .. } = replica.step(batch, moment, &mut phases).unwrap();
    let (_, laps) = phases.finish();
    assert!(
        updated.is_err()
            || [Phase::Forward, Phase::Backward, Phase::Update].iter().all(|&phase| laps.get(phase) > Some(0.0)),
        "{laps:?}"
    );
    updated
}

#[test]
fn twenty_steps_give_the_bits_of_updates_at_the_end() {
    for optimizer in Optimizer::ALL {
        let mut replicas = [None, Some(f64::INFINITY)].map(|clip_norm| replica(&varied, optimizer, clip_norm, 4));
        assert!(replicas[0].store().gradients.is_empty() && !replicas[1].store().gradients.is_empty());
        for number in 0..20 {
            let (batch, moment) = (batch(4, number), Moment { step: number, learning_rate: 0.01 });
            for replica in &mut replicas {
                step(replica, &batch, moment).unwrap();
            }
        }
        let [early, at_end] = replicas.each_ref().map(bits);
        assert!(early == at_end, "{optimizer}");
    }
}

#[test]
fn twenty_steps_in_less_memory_give_the_same_bits() {
    for (precision, clip_norm) in [(Precision::F32, None), (Precision::F32, Some(1.0)), (Precision::Bf16, None)] {
        let how = (Optimizer::Adam, clip_norm);
        let mut replicas = MemoryUse::ALL.map(|memory| replica_with(&varied, how, 4, precision, memory));
        let [kept, remade] = replicas.each_ref().map(|replica| replica.plan().activation_bytes());
        assert!(remade < kept, "{remade} against {kept} bytes");
        for number in 0..20 {
            let (batch, moment) = (batch(4, number), Moment { step: number, learning_rate: 0.01 });
            for replica in &mut replicas {
                step(replica, &batch, moment).unwrap();
            }
            assert_eq!(replicas[0].evaluate(&batch).unwrap().0, replicas[1].evaluate(&batch).unwrap().0);
        }
        let [normal, low] = replicas.each_ref().map(bits);
        assert!(normal == low, "{precision}, clipped to {clip_norm:?}");
    }
}

/// A first layer that is zero in the test, so that the result is finite whatever follows, and a large second one.
fn two_layers(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.flatten(x)?;
    let x = net.linear("block.first", x, 4)?;
    let x = net.linear("block.second", x, 300_000)?;
    net.linear("last", x, classes)
}

#[test]
fn a_gradient_that_is_no_number_stops_the_updates_and_is_named() {
    let mut replica = replica(&two_layers, Optimizer::Sgd, None, 1);
    let index = |name: &str| replica.parameters.iter().position(|parameter| parameter.name == name).unwrap();
    let (first, last) = (index("block.first.weight"), index("last.weight"));
    replica.store_mut().parameters.fill(0.0);
    // Class 0 against all others: the gradient before the last layer is twice what a number can be.
    let columns = replica.store().parameter(last).len() / 10;
    replica.store_mut().parameter_mut(last).fill(-3e38);
    replica.store_mut().parameter_mut(last)[..columns].fill(3e38);
    let mut batch = batch(1, 0);
    batch.targets[0] = 0;
    // A decay of 0.01 at a rate of 100 takes the weights to zero, so that the same batch is finite afterwards.
    let moment = Moment { step: 0, learning_rate: 100.0 };
    let Err(NotFinite::Gradient(seen)) = step(&mut replica, &batch, moment) else { panic!("a gradient is infinite") };
    assert!(replica.store().parameter(last).iter().all(|x| x.abs() < 1e38), "what was final before was applied");
    assert!(replica.store().parameter(first).iter().all(|&x| x == 0.0), "nothing was applied after it");
    assert!(replica.parameters[seen].name.starts_with("block.second"), "{}", replica.parameters[seen].name);
    assert_eq!(replica.find_non_finite(&batch, 0, NotFinite::Gradient(seen)), ("block.second".to_owned(), "gradient"));
}

#[test]
fn a_loss_that_is_no_number_leaves_the_weights() {
    let mut replica = replica(&varied, Optimizer::Adam, None, 4);
    let index = replica.parameters.iter().position(|parameter| parameter.name == "fc3.bias").unwrap();
    replica.store_mut().parameter_mut(index)[3] = f32::NAN;
    let before = replica.store().parameters.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let moment = Moment { step: 0, learning_rate: 0.1 };
    assert_eq!(step(&mut replica, &batch(4, 0), moment), Err(NotFinite::Loss));
    assert!(replica.store().parameters.iter().map(|x| x.to_bits()).eq(before));
    assert_eq!(replica.find_non_finite(&batch(4, 0), 0, NotFinite::Loss), ("fc3".to_owned(), "matmul"));
}

#[test]
fn evaluation_in_the_memory_of_training_disturbs_neither() {
    let [mut one, mut other] = [0, 1].map(|_| replica(&varied, Optimizer::Momentum, None, 4));
    for number in 0..3 {
        let moment = Moment { step: number, learning_rate: 0.01 };
        let before = one.evaluate(&batch(3, 50)).unwrap().0;
        assert_eq!(before, one.evaluate(&batch(3, 50)).unwrap().0);
        for replica in [&mut one, &mut other] {
            step(replica, &batch(4, number), moment).unwrap();
        }
        assert_ne!(before, one.evaluate(&batch(3, 50)).unwrap().0);
    }
    assert!(bits(&one) == bits(&other));
}

/// Two micro-batches are alive at once, and their gradients of weights come later: as each by itself.
#[test]
fn micro_batches_that_are_alive_at_once_have_the_gradients_of_each_alone() {
    let moment = Moment { step: 3, learning_rate: 0.0 };
    let batches = [batch(4, 1), batch(4, 2)];
    let inputs = |batch| {
        let pass = Pass { seed: 7, step: 3, first_sample: 0, samples: 4 };
        Inputs { batch, micro_batch: MicroBatch::whole(batch), pass, seed: 1.0, moment }
    };
    let expected = batches.each_ref().map(|batch| {
        let mut alone = replica(&varied, Optimizer::Sgd, Some(f64::INFINITY), 4);
        alone.engine.forward(Slot(0), &inputs(batch), &mut Unheard(moment)).unwrap();
        alone.engine.backward(Slot(0), Gradients::All, &mut Unheard(moment)).unwrap();
        alone.store().gradients.to_vec()
    });
    let options = ReplicaOptions {
        separate_gradients: true,
        slots: 0,
        ..*replica(&varied, Optimizer::Sgd, Some(f64::INFINITY), 4).options()
    };
    let mut both = Replica::new(&varied, options, &Arc::new(Cpu::new(2))).unwrap();
    for (slot, batch) in batches.iter().enumerate() {
        both.engine.forward(Slot(slot), &inputs(batch), &mut Unheard(moment)).unwrap();
    }
    for slot in 0..2 {
        both.engine.backward(Slot(slot), Gradients::Inputs, &mut Unheard(moment)).unwrap();
    }
    for slot in [1, 0] {
        both.engine.backward(Slot(slot), Gradients::Weights, &mut Unheard(moment)).unwrap();
        assert!(both.store().gradients[..] == expected[slot][..], "slot {slot}");
    }
    assert!(expected[0] != expected[1]);
}
