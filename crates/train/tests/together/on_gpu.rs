//! The same on a GPU: workers that share one, and a GPU and a CPU in one run, follow one process on the CPU.

use std::io::Write;
use std::sync::Arc;

use paceline_nn::optim::Optimizer;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{self, Cuda, Options};
use paceline_train::engine::Place;
use paceline_train::replica::Replica;

use crate::world::Carry;
use crate::{Case, MOMENTUM, STEPS, model, options, together, train};

pub fn gpu() -> Option<Arc<Cuda>> {
    let options = Options { tf32: false, deterministic: true, tune: false };
    let found = cuda::count().is_ok_and(|count| count > 0);
    found.then(|| Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"))))
}

pub fn replica(place: (usize, usize), case: Case, cuda: Arc<Cuda>) -> Replica {
    Replica::at(model(case), options(place, case), &Place::Cuda(Arc::new(Cpu::new(1)), cuda)).unwrap()
}

/// How far numbers are apart, in lengths of the second.
fn apart(found: &[f32], expected: &[f32]) -> f64 {
    let length = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    length(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / length(&mut expected.iter().copied()).max(1e-30)
}

/// Twenty steps, held to one process on the CPU; products are added up in another order there, and dropout is
/// the same.
fn follows(case: Case) {
    let test = format!("{case:?}");
    if gpu().is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: together::on_gpu: no GPU");
        return;
    }
    let alone = Case { gpus: 0, ..case };
    let expected = train(crate::replica((0, 1), alone), (0, 1), alone);
    let all = together(case);
    assert_eq!(all.len(), case.workers);
    // Servers' weights are everybody's; sums are applied by every device in its own arithmetic.
    let same = if case.servers.is_some() { 0.0 } else { 1e-5 };
    for found in &all {
        let between = apart(&found.weights, &all[0].weights);
        assert!(between <= same, "{test}: ranks are {between:e} apart");
        let weights = apart(&found.weights, &expected.weights);
        assert!(weights < 2e-4, "{test}: weights are {weights:e} from one process");
        if !expected.states.is_empty() {
            let states = apart(&found.states, &expected.states);
            assert!(states < 2e-4, "{test}: running statistics are {states:e} from one process");
        }
        for (step, (loss, expected)) in found.losses.iter().zip(&expected.losses).enumerate() {
            assert!((loss / expected - 1.0).abs() < 1e-3, "{test}: loss {loss} for {expected} at step {step}");
        }
        // With this rate, LARS takes steps of a thousandth.
        let learns = found.losses[STEPS as usize - 1] < found.losses[0];
        assert!(learns || case.optimizer == Optimizer::Lars, "{test}: it learns: {:?}", found.losses);
    }
}

#[test]
fn workers_on_one_gpu_follow_one_process_over_every_carry() {
    for carry in Carry::ALL {
        follows(Case { carry, gpus: 2, ..MOMENTUM });
    }
    follows(Case { carry: Carry::Tcp, gpus: 2, optimizer: Optimizer::Adam, ..MOMENTUM });
}

#[test]
fn a_gpu_and_a_cpu_follow_one_process() {
    for carry in [Carry::Shm, Carry::Tcp] {
        follows(Case { carry, gpus: 1, ..MOMENTUM });
        follows(Case { carry, gpus: 1, sync_batch_norm: true, urgent: true, ..MOMENTUM });
    }
    follows(Case { gpus: 1, servers: Some((1, Some(0))), ..MOMENTUM });
}

#[test]
fn shares_on_a_gpu_need_not_be_equal_nor_batches_whole() {
    for rest in [7, 2] {
        let case = Case { workers: 3, gpus: 3, carry: Carry::Tcp, rest, ..MOMENTUM };
        follows(Case { workers: 1, gpus: 1, ..case });
        follows(case);
        follows(Case { gpus: 1, ..case });
        follows(Case { accumulate: 3, ..case });
        follows(Case { servers: Some((1, Some(0))), ..case });
    }
    for (workers, rest) in [(3, 7), (5, 4)] {
        follows(Case { workers, gpus: 2, carry: Carry::Tcp, rest, sync_batch_norm: true, urgent: true, ..MOMENTUM });
    }
}

#[test]
fn workers_on_a_gpu_push_to_servers() {
    for carry in Carry::ALL {
        follows(Case { carry, gpus: 2, servers: Some((2, Some(0))), ..MOMENTUM });
    }
    follows(Case { gpus: 2, servers: Some((1, Some(0))), accumulate: 2, ..MOMENTUM });
}

#[test]
fn workers_of_an_asynchronous_server_learn_on_a_gpu() {
    if gpu().is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: workers_of_an_asynchronous_server_learn_on_a_gpu: no GPU");
        return;
    }
    for staleness in [None, Some(2)] {
        for found in together(Case { gpus: 2, servers: Some((1, staleness)), ..MOMENTUM }) {
            let (first, last) = (found.losses[..3].iter().sum::<f64>(), found.losses[17..].iter().sum::<f64>());
            assert!(last < first, "{staleness:?}: {:?}", found.losses);
        }
    }
}

#[test]
fn batch_norms_over_workers_on_a_gpu_are_those_of_the_whole_batch() {
    for carry in [Carry::Thread, Carry::Tcp] {
        follows(Case { carry, gpus: 2, sync_batch_norm: true, urgent: true, ..MOMENTUM });
    }
}

#[test]
fn what_looks_at_all_gradients_follows_one_process_on_a_gpu() {
    follows(Case { gpus: 2, clip_norm: Some(0.5), ..MOMENTUM });
    follows(Case { gpus: 2, accumulate: 2, ..MOMENTUM });
    follows(Case { gpus: 2, overlap: false, ..MOMENTUM });
    follows(Case { gpus: 2, optimizer: Optimizer::Lars, ..MOMENTUM });
}
