//! The LSTM against its recurrence written out in f64.

use super::*;
use crate::device::cpu::check::{assert_close, numbers, same_bits, slope, weigh, wide};

fn naive(_: &mut Context<'_>, product: Product<'_>) {
    let Product { m, n, k, a, b, c, .. } = product;
    for row in 0..m {
        for column in 0..n {
            let a = |index: usize| if product.trans_a { a[index * m + row] } else { a[row * k + index] };
            let b = |index: usize| if product.trans_b { b[column * k + index] } else { b[index * n + column] };
            let sum: f64 = (0..k).map(|index| f64::from(a(index)) * f64::from(b(index))).sum();
            let old = if product.accumulate { c[row * n + column] } else { 0.0 };
            c[row * n + column] = old + sum as f32;
        }
    }
}

struct Case {
    size: Lstm,
    /// x, w_ih, w_hh, b_ih, b_hh.
    point: Vec<f32>,
}

impl Case {
    fn new(batch: usize, steps: usize, inputs: usize, hidden: usize) -> Self {
        let size = Lstm { batch, steps, inputs, hidden };
        let count = batch * steps * inputs + 4 * hidden * (inputs + hidden + 2);
        Self { size, point: numbers(1, count) }
    }

    fn split<'a, T>(&self, point: &'a [T]) -> [&'a [T]; 5] {
        let Lstm { batch, steps, inputs, hidden } = self.size;
        let mut rest = point;
        [batch * steps * inputs, 4 * hidden * inputs, 4 * hidden * hidden, 4 * hidden, 4 * hidden].map(|length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            part
        })
    }

    fn inputs(&self) -> Inputs<'_> {
        let [x, w_ih, w_hh, b_ih, b_hh] = self.split(&self.point);
        Inputs { x, w_ih, w_hh, b_ih, b_hh }
    }

    fn reference(&self, point: &[f64]) -> Vec<f64> {
        let Lstm { batch, steps, inputs, hidden } = self.size;
        let [x, w_ih, w_hh, b_ih, b_hh] = self.split(point);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut y = Vec::new();
        for item in 0..batch {
            let (mut state, mut cell) = (vec![0.0; hidden], vec![0.0; hidden]);
            for step in 0..steps {
                let x = &x[(item * steps + step) * inputs..][..inputs];
                let gate = |unit: usize| {
                    let weighted =
                        dot(x, &w_ih[unit * inputs..][..inputs]) + dot(&state, &w_hh[unit * hidden..][..hidden]);
                    weighted + b_ih[unit] + b_hh[unit]
                };
                let gates: Vec<f64> = (0..4 * hidden).map(gate).collect();
                for unit in 0..hidden {
                    let [enter, forget, new, out] = [0, 1, 2, 3].map(|gate| gates[gate * hidden + unit]);
                    cell[unit] = sigmoid(forget) * cell[unit] + sigmoid(enter) * new.tanh();
                    state[unit] = sigmoid(out) * cell[unit].tanh();
                }
                y.extend(&state);
            }
        }
        y
    }

    fn forward(&self, context: &mut Context<'_>) -> [Vec<f32>; 3] {
        let Lstm { batch, steps, hidden, .. } = self.size;
        let rows = batch * steps;
        let [mut y, mut gates, mut cells] = [1, 4, 1].map(|width| vec![f32::NAN; rows * width * hidden]);
        let output = Outputs { y: &mut y, gates: &mut gates, cells: &mut cells };
        forward(context, naive, self.size, self.inputs(), output);
        [y, gates, cells]
    }

    fn gradient(&self, context: &mut Context<'_>, dy: &[f32]) -> Vec<f32> {
        let [y, gates, cells] = self.forward(context);
        let [mut dx, mut dw_ih, mut dw_hh, mut db, _] = self.split(&self.point).map(|part| vec![f32::NAN; part.len()]);
        context.scratch.floats = vec![7.0; 3];
        let output = Gradients { dx: Some(&mut dx), dw_ih: &mut dw_ih, dw_hh: &mut dw_hh, db: &mut db };
        let saved = Saved { dy, y: &y, gates: &gates, cells: &cells };
        gradient(context, naive, self.size, self.inputs(), saved, output);
        [dx, dw_ih, dw_hh, db.clone(), db].concat()
    }
}

#[test]
fn sequences_and_gradients_follow_the_recurrence() {
    for case in [Case::new(1, 1, 1, 1), Case::new(3, 4, 2, 5), Case::new(2, 3, 5, 17)] {
        let y = same_bits(|context| case.forward(context)[0].clone());
        assert_close(&y, &case.reference(&wide(&case.point)), 2e-6);
        let dy = numbers(2, y.len());
        let all = same_bits(|context| case.gradient(context, &dy));
        assert_close(&all, &slope(&case.point, |point| weigh(&case.reference(point), &dy)), 2e-5);
    }
}
