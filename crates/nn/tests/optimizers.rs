//! The optimizers against PyTorch's, and what holds for all of them.
//!
//! `optimizers.json` was made by `tools/optimizers.py` with torch 2.15 in float64: five steps of every rule on a
//! seven-element problem with a changing learning rate. LARS, and momentum that is not rescaled, are not in PyTorch; the
//! script writes their formulas out.

use std::sync::Mutex;

use paceline_nn::optim::{
    Buffers, HyperParameters, Moment, Optimizer, Rule, Runner, Segment, clip_factor, global_norm, scale, serial,
};

#[derive(serde::Deserialize)]
struct Golden {
    optimizer: Optimizer,
    hyper: HyperParameters,
    weights: Vec<Vec<f64>>,
}

const START: [f32; 7] = [0.3, -0.8, 1.1, 0.05, -0.4, 0.9, 0.6];
const RATES: [f32; 5] = [0.1, 0.1, 0.05, 0.05, 0.01];

fn gradient(weights: &[f32]) -> Vec<f32> {
    let a = [0.5, 1.0, 2.0, 0.1, 3.0, 0.7, 1.5];
    let b = [1.0, -1.0, 0.3, 2.0, 0.0, -0.6, 0.2];
    weights.iter().zip(a).zip(b).map(|((&w, a), b)| a * (w - b).powi(3) + w.cos()).collect()
}

/// The segments of parameters that lie one after the other, given as (elements, decay).
fn consecutive(parameters: impl IntoIterator<Item = (usize, bool)>) -> Vec<Segment> {
    let mut start = 0;
    let place = |(elements, decay)| {
        let range = start..start + elements;
        start = range.end;
        Segment { range, decay }
    };
    parameters.into_iter().map(place).collect()
}

#[test]
fn five_steps_of_every_rule_follow_pytorch() {
    let cases: Vec<Golden> = serde_json::from_str(include_str!("optimizers.json")).unwrap();
    let segments = consecutive([(4, true), (3, false)]);
    for Golden { optimizer, hyper, weights: expected } in &cases {
        let rule = optimizer.rule(hyper).unwrap();
        let mut weights = START.to_vec();
        let mut state = rule.new_state(weights.len());
        for (step, (&learning_rate, expected)) in RATES.iter().zip(expected).enumerate() {
            let gradients = gradient(&weights);
            let moment = Moment { step: step as u64, learning_rate };
            let buffers = Buffers { weights: &mut weights, gradients: &gradients, state: &mut state };
            rule.update(moment, &segments, buffers, &serial);
            for (index, (&found, &expected)) in weights.iter().zip(expected).enumerate() {
                let apart = (f64::from(found) - expected).abs();
                assert!(apart <= 1e-6, "{optimizer} {hyper:?} step {step} weight {index}: {found} is not {expected}");
            }
        }
    }
    assert!(Optimizer::ALL.iter().all(|optimizer| cases.iter().any(|case| case.optimizer == *optimizer)));
}

/// Runs the tasks in reverse on three threads.
fn threads(tasks: usize, body: &(dyn Fn(usize) + Sync)) {
    let next = Mutex::new((0..tasks).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let Some(task) = next.lock().unwrap().pop() else { break };
                    body(task);
                }
            });
        }
    });
}

type Snapshot = (Vec<f32>, Vec<Vec<f32>>);

/// Two steps of 100,000 weights, with the segments of each step applied in the given groups.
fn train(rule: &Rule, groups: &[&[Segment]], run: Runner<'_>) -> Snapshot {
    let mut weights: Vec<f32> = (0..100_000).map(|index| ((index * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let mut state = rule.new_state(weights.len());
    for step in 0..2 {
        let gradients: Vec<f32> = weights.iter().map(|w| (w * 3.0 + step as f32).sin()).collect();
        for segments in groups {
            let buffers = Buffers { weights: &mut weights, gradients: &gradients, state: &mut state };
            rule.update(Moment { step, learning_rate: 0.1 }, segments, buffers, run);
        }
    }
    (weights, state)
}

#[test]
fn threads_and_buckets_do_not_change_a_bit() {
    let segments = consecutive([(50_000, true), (3, false), (49_997, true)]);
    let hyper = HyperParameters { weight_decay: Some(0.1), ..HyperParameters::default() };
    for optimizer in Optimizer::ALL {
        let rule = optimizer.rule(&hyper).unwrap();
        let whole = train(&rule, &[&segments], &serial);
        assert_eq!(whole, train(&rule, &[&segments], &threads), "{optimizer} on threads");
        assert_eq!(whole, train(&rule, &[&segments[2..], &segments[..2]], &threads), "{optimizer} in buckets");
    }
}

#[test]
fn weights_outside_the_segments_stay() {
    let rule = Optimizer::Adam.rule(&HyperParameters::default()).unwrap();
    let mut weights = vec![1.0; 9];
    let mut state = rule.new_state(9);
    let segments = [Segment { range: 2..4, decay: true }, Segment { range: 6..7, decay: true }];
    let buffers = Buffers { weights: &mut weights, gradients: &[1.0; 9], state: &mut state };
    rule.update(Moment { step: 0, learning_rate: 0.5 }, &segments, buffers, &serial);
    let changed: Vec<usize> = (0..9).filter(|&index| weights[index] != 1.0).collect();
    assert_eq!(changed, [2, 3, 6]);
    let changed: Vec<usize> = (0..9).filter(|&index| state[1][index] != 0.0).collect();
    assert_eq!(changed, [2, 3, 6]);
}

#[test]
fn a_large_gradient_is_clipped_to_the_norm_asked_for() {
    let mut gradients = vec![3.0; 40_000];
    let segments = consecutive([(20_000, true), (20_000, false)]);
    let norm = global_norm(&gradients, &segments, &threads);
    assert_eq!(norm, 600.0);
    assert_eq!(norm.to_bits(), global_norm(&gradients, &segments, &serial).to_bits());
    scale(&mut gradients, &segments, clip_factor(norm, 6.0).unwrap());
    assert!((global_norm(&gradients, &segments, &serial) - 6.0).abs() < 1e-5);
    assert_eq!(clip_factor(5.0, 6.0), None);
    assert_eq!(clip_factor(f64::NAN, 6.0), None);
}

#[test]
fn names_are_spelled_the_same_everywhere() {
    for optimizer in Optimizer::ALL {
        assert_eq!(optimizer.name().parse(), Ok(optimizer));
        assert_eq!(serde_json::to_string(&optimizer).unwrap(), format!("\"{optimizer}\""));
    }
    let error = "rmsprop".parse::<Optimizer>().unwrap_err();
    assert!(error.starts_with("there is no optimizer `rmsprop`; write one of sgd, momentum"), "{error}");
}

#[test]
fn constants_out_of_range_are_refused_with_what_to_write() {
    let defaults = HyperParameters::default();
    let refused = |hyper: HyperParameters| Optimizer::Adam.rule(&hyper).unwrap_err().to_string();
    assert_eq!(
        refused(HyperParameters { betas: [0.9, 1.0], ..defaults }),
        "betas = 1 does not work; write a number from 0 to below 1"
    );
    assert!(refused(HyperParameters { momentum: f32::NAN, ..defaults }).starts_with("momentum = NaN"));
    assert!(refused(HyperParameters { weight_decay: Some(-1.0), ..defaults }).starts_with("weight-decay = -1"));
    assert!(refused(HyperParameters { epsilon: Some(0.0), ..defaults }).starts_with("epsilon = 0"));
}
