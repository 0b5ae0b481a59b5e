//! Softmax, loss, embedding and recurrence by their definitions.

use super::array::Array;
use super::interpret::sigmoid;

/// Over the last dim; `causal` lets row t of each square see columns up to t.
pub fn softmax(x: &Array, causal: bool) -> Array {
    let width = x.last();
    let mut y = x.clone();
    for (number, row) in y.data.chunks_mut(width).enumerate() {
        let seen = if causal { number % width + 1 } else { width };
        let total: f64 = row[..seen].iter().map(|x| x.exp()).sum();
        row[..seen].iter_mut().for_each(|x| *x = x.exp() / total);
        row[seen..].fill(0.0);
    }
    y
}

/// The mean over the rows of −Σ target · log softmax, where smoothing gives every class its even share.
pub fn cross_entropy(logits: &Array, targets: &Array, smoothing: f32) -> Array {
    let (classes, smoothing) = (logits.last(), f64::from(smoothing));
    let mut loss = 0.0;
    for (row, target) in logits.data.chunks(classes).zip(&targets.data) {
        let log_total = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        for (class, x) in row.iter().enumerate() {
            let hit = if class == *target as usize { 1.0 - smoothing } else { 0.0 };
            loss -= (hit + smoothing / classes as f64) * (x - log_total);
        }
    }
    Array::new(&[1], vec![loss / logits.rows() as f64])
}

/// A row of the table per number.
pub fn embedding(ids: &Array, table: &Array) -> Array {
    let mut shape = ids.shape.clone();
    shape.push(table.last());
    Array::from_fn(&shape, |index| {
        let (&column, place) = index.split_last().expect("a table is two-dimensional");
        table.at(&[ids.at(place) as usize, column])
    })
}

/// x, w_ih, w_hh, b_ih, b_hh → y, gates after their functions, cells. Gates in the order input, forget, cell, output.
pub fn lstm(inputs: &[&Array]) -> Vec<Array> {
    let [x, w_ih, w_hh, b_ih, b_hh] = inputs[..] else { panic!("an LSTM has five inputs") };
    let ([batch, steps, width], hidden) = ([x.shape[0], x.shape[1], x.shape[2]], w_hh.shape[1]);
    let mut y = Array::zeros(&[batch, steps, hidden]);
    let (mut gates, mut cells) = (Array::zeros(&[batch, steps, 4 * hidden]), y.clone());
    for n in 0..batch {
        for t in 0..steps {
            for gate in 0..4 * hidden {
                let mut sum = b_ih.at(&[gate]) + b_hh.at(&[gate]);
                sum += (0..width).map(|i| w_ih.at(&[gate, i]) * x.at(&[n, t, i])).sum::<f64>();
                if t > 0 {
                    sum += (0..hidden).map(|h| w_hh.at(&[gate, h]) * y.at(&[n, t - 1, h])).sum::<f64>();
                }
                *gates.at_mut(&[n, t, gate]) = if gate / hidden == 2 { sum.tanh() } else { sigmoid(sum) };
            }
            for h in 0..hidden {
                let [input, forget, new, output] = [0, 1, 2, 3].map(|gate| gates.at(&[n, t, gate * hidden + h]));
                let before = if t > 0 { cells.at(&[n, t - 1, h]) } else { 0.0 };
                let cell = forget * before + input * new;
                *cells.at_mut(&[n, t, h]) = cell;
                *y.at_mut(&[n, t, h]) = output * cell.tanh();
            }
        }
    }
    vec![y, gates, cells]
}
