//! The arithmetic of the optimizers: one pass over a tensor's weights, its gradient and what the rule keeps of it.
//!
//! Every element is on its own, so a tensor may come in parts, and neither the parts nor the threads change a bit. The
//! bound is memory bandwidth: 12 bytes an element for plain descent, 20 with one kept tensor, 28 with two, less what is
//! still in the caches of a gradient that was just computed. Which constants, and why, is told in `nn/src/optim`.

use super::Cpu;
use super::vectorize::vectorized;

/// Elements of a task: 64 KiB of weights, so that what a task reads and writes stays in a core's cache.
const PIECE: usize = 16 * 1024;

/// How a weight w changes with its gradient g, with the constants of this step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// w −= rate·(g + decay·w)
    Descent {
        /// η
        rate: f32,
        /// λ
        decay: f32,
    },
    /// v = momentum·v + inside·(g + decay·w), w −= outside·v; looking ahead, w −= outside·(inside·(g + decay·w) + momentum·v)
    Momentum {
        /// μ
        momentum: f32,
        /// What multiplies the gradient on its way into v.
        inside: f32,
        /// What multiplies v on its way into w.
        outside: f32,
        /// λ
        decay: f32,
        /// Nesterov's.
        ahead: bool,
    },
    /// s += (g + decay·w)², w −= rate·(g + decay·w)/(√s + epsilon)
    Adagrad {
        /// η
        rate: f32,
        /// ε
        epsilon: f32,
        /// λ
        decay: f32,
    },
    /// m = β₁m + rest₁·g, s = β₂s + rest₂·g², w = kept·w − rate·m/(√s·root + epsilon), with g + decay·w for g
    Adam {
        /// η over the first moment's correction.
        rate: f32,
        /// One over the root of the second moment's correction.
        root: f32,
        /// β₁ and β₂
        betas: [f32; 2],
        /// What is left of 1.
        rests: [f32; 2],
        /// ε
        epsilon: f32,
        /// λ where it is added to the gradient.
        decay: f32,
        /// What is left of a weight where the decay is its own.
        kept: f32,
    },
}

/// A tensor, or a part of one.
#[derive(Debug)]
pub struct Tensor<'a> {
    /// Changed in place.
    pub weights: &'a mut [f32],
    /// Of the same length.
    pub gradients: &'a [f32],
    /// What the rule keeps, of the same length; slots that it does not have are empty.
    pub state: [&'a mut [f32]; 2],
}

/// Changes the weights and what is kept of them.
///
/// # Panics
/// When a slice that the rule uses has another length than the weights.
pub fn update(cpu: &Cpu, how: Update, tensor: Tensor<'_>) {
    let Tensor { weights, gradients, state: [first, second] } = tensor;
    let (pool, isa, length) = (cpu.pool(), cpu.isa(), weights.len());
    assert_eq!(gradients.len(), length, "one gradient for each weight");
    let piece = |task: usize| &gradients[task * PIECE..length.min((task + 1) * PIECE)];
    match how {
        Update::Descent { .. } => {
            pool.chunks(weights, PIECE, |task, weights| piece_of(isa, how, weights, piece(task), &mut [], &mut []));
        }
        Update::Momentum { .. } | Update::Adagrad { .. } => {
            assert_eq!(first.len(), length, "one kept value for each weight");
            pool.chunks2((weights, PIECE), (first, PIECE), |task, weights, first| {
                piece_of(isa, how, weights, piece(task), first, &mut []);
            });
        }
        Update::Adam { .. } => {
            assert!(first.len() == length && second.len() == length, "two kept values for each weight");
            pool.chunks3((weights, PIECE), (first, PIECE), (second, PIECE), |task, weights, first, second| {
                piece_of(isa, how, weights, piece(task), first, second);
            });
        }
    }
}

vectorized! {
    fn piece_of(how: Update, weights: &mut [f32], gradients: &[f32], first: &mut [f32], second: &mut [f32]) {
        match how {
            Update::Descent { rate, decay } => {
                for (weight, &gradient) in weights.iter_mut().zip(gradients) {
                    *weight -= rate * (gradient + decay * *weight);
                }
            }
            Update::Momentum { momentum, inside, outside, decay, ahead } => {
                let elements = weights.iter_mut().zip(gradients).zip(first);
                if ahead {
                    for ((weight, &gradient), velocity) in elements {
                        let gradient = inside * (gradient + decay * *weight);
                        *velocity = momentum * *velocity + gradient;
                        *weight -= outside * (gradient + momentum * *velocity);
                    }
                } else {
                    for ((weight, &gradient), velocity) in elements {
                        *velocity = momentum * *velocity + inside * (gradient + decay * *weight);
                        *weight -= outside * *velocity;
                    }
                }
            }
            Update::Adagrad { rate, epsilon, decay } => {
                for ((weight, &gradient), sum) in weights.iter_mut().zip(gradients).zip(first) {
                    let gradient = gradient + decay * *weight;
                    *sum += gradient * gradient;
                    *weight -= rate * gradient / (sum.sqrt() + epsilon);
                }
            }
            Update::Adam { rate, root, betas, rests, epsilon, decay, kept } => {
                let moments = first.iter_mut().zip(second);
                for ((weight, &gradient), (mean, square)) in weights.iter_mut().zip(gradients).zip(moments) {
                    let gradient = gradient + decay * *weight;
                    *mean = betas[0] * *mean + rests[0] * gradient;
                    *square = betas[1] * *square + rests[1] * gradient * gradient;
                    *weight = kept * *weight - rate * *mean / (square.sqrt() * root + epsilon);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_system::random::Random;

    use super::*;

    /// One element, as the formulas above say it.
    fn reference(how: Update, weight: &mut f32, gradient: f32, [first, second]: [&mut f32; 2]) {
        match how {
            Update::Descent { rate, decay } => *weight -= rate * (gradient + decay * *weight),
            Update::Momentum { momentum, inside, outside, decay, ahead } => {
                let inside = inside * (gradient + decay * *weight);
                *first = momentum * *first + inside;
                *weight -= outside * if ahead { inside + momentum * *first } else { *first };
            }
            Update::Adagrad { rate, epsilon, decay } => {
                let gradient = gradient + decay * *weight;
                *first += gradient * gradient;
                *weight -= rate * gradient / (first.sqrt() + epsilon);
            }
            Update::Adam { rate, root, betas, rests, epsilon, decay, kept } => {
                let gradient = gradient + decay * *weight;
                *first = betas[0] * *first + rests[0] * gradient;
                *second = betas[1] * *second + rests[1] * gradient * gradient;
                *weight = kept * *weight - rate * *first / (second.sqrt() * root + epsilon);
            }
        }
    }

    fn rules() -> Vec<Update> {
        let momentum = |ahead| Update::Momentum { momentum: 0.9, inside: 1.0, outside: 0.1, decay: 0.01, ahead };
        let (betas, rests) = ([0.9, 0.999], [0.1, 0.001]);
        vec![
            Update::Descent { rate: 0.1, decay: 0.01 },
            momentum(false),
            momentum(true),
            Update::Adagrad { rate: 0.1, epsilon: 1e-10, decay: 0.01 },
            Update::Adam { rate: 0.01, root: 1.7, betas, rests, epsilon: 1e-8, decay: 0.01, kept: 0.99 },
        ]
    }

    #[test]
    fn every_rule_is_its_formula_on_any_number_of_threads() {
        let cpus = [1, 3].map(Cpu::new);
        for how in rules() {
            for length in [0, 1, 15, 100, PIECE + 1, 5 * PIECE + 37] {
                let mut random = Random::new(&[length as u64]);
                let mut numbers = || (0..length).map(|_| random.normal()).collect::<Vec<f32>>();
                let (weights, gradients) = (numbers(), numbers());
                let [mut first, mut second] = [numbers(), numbers()];
                first.iter_mut().chain(&mut second).for_each(|kept| *kept = kept.abs());
                let mut expected = (weights.clone(), first.clone(), second.clone());
                for (index, &gradient) in gradients.iter().enumerate() {
                    let kept = [&mut expected.1[index], &mut expected.2[index]];
                    reference(how, &mut expected.0[index], gradient, kept);
                }
                for cpu in &cpus {
                    let mut found = (weights.clone(), first.clone(), second.clone());
                    let state = [&mut found.1[..], &mut found.2[..]];
                    update(cpu, how, Tensor { weights: &mut found.0, gradients: &gradients, state });
                    assert_eq!(found, expected, "{how:?} of {length}");
                }
            }
        }
    }
}
