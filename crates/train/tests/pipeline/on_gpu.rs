//! Stages on a GPU, and on a GPU and its CPU, follow one process on the CPU.

use std::io::Write;
use std::sync::Arc;

use paceline_nn::zoo;
use paceline_tensor::device::cuda::{self, Cuda, Options};

use crate::world::Carry;
use crate::{Case, KINDS, SMALL, case, names, native, skipping};

pub fn gpu() -> Option<Arc<Cuda>> {
    let options = Options { tf32: false, deterministic: true, tune: false };
    let found = cuda::count().is_ok_and(|count| count > 0);
    found.then(|| Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"))))
}

/// How far stages may be from the CPU, in times of what the whole model is on the GPU.
const AS_ONE_GPU: f64 = 4.0;

/// Both stages on the GPU, and either on the CPU, by every schedule. Sums are added up in another order there, and
/// batch-norms over few samples magnify that: `near` of a tensor's length, or a few times as far as the whole model is on
/// the GPU.
fn follows(test: &str, whole: Case<'_>, cut: &str, near: f64) {
    if gpu().is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: pipeline::on_gpu::{test}: no GPU");
        return;
    }
    let (expected, cuts) = (whole.run(), names(&[cut]));
    let alone = Case { on_gpu: &[0], ..whole }.run();
    for on_gpu in [&[0][..], &[1], &[0, 1]] {
        for kind in KINDS {
            let found = Case { cuts: &cuts, kind, on_gpu, ..whole }.run();
            assert_eq!(found.tensors.len(), expected.tensors.len());
            for (name, numbers) in &expected.tensors {
                let [apart, whole] = [&found, &alone].map(|trained| apart(&trained.tensors[name], numbers));
                assert!(
                    apart <= near.max(AS_ONE_GPU * whole),
                    "stages {on_gpu:?} on the GPU, {kind}: {name} is {apart:e} from the CPU's, and the whole model {whole:e}"
                );
            }
            for (loss, expected) in found.losses.iter().zip(&expected.losses) {
                assert!((loss / expected - 1.0).abs() < 1e-3, "{on_gpu:?}, {kind}: loss {loss} for {expected}");
            }
        }
    }
}

/// How far numbers are apart, in lengths of the second; of a tensor that is nearly zero, in themselves.
fn apart(found: &[f32], expected: &[f32]) -> f64 {
    let length = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    length(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / length(&mut expected.iter().copied()).max(1e-2)
}

fn zoo_case(name: &str, cut: &str, (size, batch, near): (usize, usize, f64)) {
    let entry = zoo::find(name).unwrap();
    follows(name, case(entry, native(entry.native, size), batch, 2), cut, near);
}

#[test]
fn lenet5_is_lenet5() {
    zoo_case("lenet5", "conv2", (32, 8, 1e-4));
}

#[test]
fn alexnet_has_its_dropout() {
    zoo_case("alexnet", "features.8", (64, 6, 1e-4));
}

#[test]
fn resnet20_has_its_batch_norms() {
    zoo_case("resnet20", "layer1", (32, 32, 1e-3));
}

#[test]
fn an_lstm_has_a_layer_per_stage() {
    zoo_case("lstm", "lstm.0", (12, 8, 1e-4));
}

#[test]
fn what_skips_a_stage_travels_through_both_memories() {
    follows("skipping", case(&skipping, SMALL, 12, 3), "b_norm", 1e-3);
    follows("clipped", Case { clip_norm: Some(0.3), ..case(&skipping, SMALL, 12, 2) }, "b_norm", 1e-3);
}

#[test]
fn two_workers_of_two_stages_add_up_gradients_of_a_gpu() {
    for carry in [Carry::Thread, Carry::Tcp] {
        let whole = Case { workers: 2, carry, ..case(&skipping, SMALL, 12, 2) };
        follows("two workers", whole, "b_norm", 1e-3);
        follows("uneven shares", Case { rest: 5, batch: 13, ..whole }, "b_norm", 1e-3);
    }
}
