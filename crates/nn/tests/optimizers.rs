//! The optimizers against PyTorch's, and what holds for all of them.
//!
//! `optimizers.json` was made by `tools/optimizers.py` with torch 2.15 in float64: five steps of every rule on a
//! seven-element problem with a changing learning rate. LARS, and momentum that is not rescaled, are not in PyTorch; the
//! script writes their formulas out.

use paceline_nn::optim::{
    Buffers, HyperParameters, Moment, Optimizer, Rule, Segment, Tools, clip_factor, global_norm, scale, state_of,
};
use paceline_tensor::Buffer;
use paceline_tensor::device::cpu::Cpu;

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
    let (segments, cpu) = (consecutive([(4, true), (3, false)]), Cpu::new(1));
    for Golden { optimizer, hyper, weights: expected } in &cases {
        let rule = optimizer.rule(hyper).unwrap();
        let mut weights = START.to_vec();
        let mut state = rule.new_state(weights.len());
        for (step, (&learning_rate, expected)) in RATES.iter().zip(expected).enumerate() {
            let gradients = gradient(&weights);
            let moment = Moment { step: step as u64, learning_rate };
            let state = state_of(&mut state, 0..7);
            let buffers = Buffers { start: 0, weights: &mut weights, gradients: &gradients, state };
            rule.update(moment, &segments, buffers, &mut Tools { cpu: &cpu, sums: &mut Vec::new() });
            for (index, (&found, &expected)) in weights.iter().zip(expected).enumerate() {
                let apart = (f64::from(found) - expected).abs();
                assert!(apart <= 1e-6, "{optimizer} {hyper:?} step {step} weight {index}: {found} is not {expected}");
            }
        }
    }
    assert!(Optimizer::ALL.iter().all(|optimizer| cases.iter().any(|case| case.optimizer == *optimizer)));
}

type Snapshot = (Vec<f32>, Vec<Vec<f32>>);

/// Two steps of 100,000 weights, which come in the stretches `cuts`.
fn train(rule: &Rule, segments: &[Segment], cuts: &[(usize, usize)], cpu: &Cpu) -> Snapshot {
    let mut weights: Vec<f32> = (0..100_000).map(|index| ((index * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let mut state = rule.new_state(weights.len());
    let mut sums = Vec::new();
    for step in 0..2 {
        let gradients: Vec<f32> = weights.iter().map(|w| (w * 3.0 + step as f32).sin()).collect();
        for &(start, end) in cuts {
            let cut = start..end;
            let (weights, state) = (&mut weights[cut.clone()], state_of(&mut state, cut.clone()));
            let buffers = Buffers { start, weights, gradients: &gradients[cut], state };
            let moment = Moment { step, learning_rate: 0.1 };
            rule.update(moment, segments, buffers, &mut Tools { cpu, sums: &mut sums });
        }
    }
    (weights, state.iter().map(|slot| slot.to_vec()).collect())
}

#[test]
fn threads_and_buckets_do_not_change_a_bit() {
    let segments = consecutive([(50_000, true), (3, false), (49_997, true)]);
    let hyper = HyperParameters { weight_decay: Some(0.1), ..HyperParameters::default() };
    let [one, three] = [1, 3].map(Cpu::new);
    for optimizer in Optimizer::ALL {
        let rule = optimizer.rule(&hyper).unwrap();
        let whole = train(&rule, &segments, &[(0, 100_000)], &one);
        assert_eq!(whole, train(&rule, &segments, &[(0, 100_000)], &three), "{optimizer} on threads");
        let cuts = [(50_003, 100_000), (0, 50_003)];
        assert_eq!(whole, train(&rule, &segments, &cuts, &three), "{optimizer} in buckets");
        if !rule.needs_whole_tensors() {
            let cuts = [(70_001, 100_000), (33_333, 70_001), (0, 33_333)];
            assert_eq!(whole, train(&rule, &segments, &cuts, &three), "{optimizer} in parts of tensors");
        }
    }
}

#[test]
#[should_panic(expected = "LARS takes whole tensors")]
fn lars_refuses_a_part_of_a_tensor() {
    let rule = Optimizer::Lars.rule(&HyperParameters::default()).unwrap();
    train(&rule, &consecutive([(100_000, true)]), &[(0, 50_000)], &Cpu::new(1));
}

#[test]
fn weights_outside_the_segments_stay() {
    let rule = Optimizer::Adam.rule(&HyperParameters::default()).unwrap();
    let mut weights = vec![1.0; 9];
    let mut state: Vec<Buffer> = rule.new_state(9);
    let segments = [Segment { range: 2..4, decay: true }, Segment { range: 6..7, decay: true }];
    let slots = state_of(&mut state, 0..9);
    let buffers = Buffers { start: 0, weights: &mut weights, gradients: &[1.0; 9], state: slots };
    let tools = &mut Tools { cpu: &Cpu::new(1), sums: &mut Vec::new() };
    rule.update(Moment { step: 0, learning_rate: 0.5 }, &segments, buffers, tools);
    let changed: Vec<usize> = (0..9).filter(|&index| weights[index] != 1.0).collect();
    assert_eq!(changed, [2, 3, 6]);
    let changed: Vec<usize> = (0..9).filter(|&index| state[1][index] != 0.0).collect();
    assert_eq!(changed, [2, 3, 6]);
}

#[test]
fn a_large_gradient_is_clipped_to_the_norm_asked_for() {
    let mut gradients = vec![3.0; 40_000];
    let segments = consecutive([(20_000, true), (20_000, false)]);
    let (one, three, mut sums) = (Cpu::new(1), Cpu::new(3), Vec::new());
    let norm = global_norm(&gradients, &segments, &mut Tools { cpu: &three, sums: &mut sums });
    let tools = &mut Tools { cpu: &one, sums: &mut sums };
    assert_eq!(norm, 600.0);
    assert_eq!(norm.to_bits(), global_norm(&gradients, &segments, tools).to_bits());
    scale(&mut gradients, clip_factor(norm, 6.0).unwrap(), tools);
    assert!((global_norm(&gradients, &segments, tools) - 6.0).abs() < 1e-5);
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
