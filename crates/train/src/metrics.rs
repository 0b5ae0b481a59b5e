//! How good an answer is: loss and top-k over rows of logits, on the host.

/// Sums over samples, from which means are taken at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Rows counted.
    pub rows: u64,
    /// Sum of their losses.
    pub loss: f64,
    /// Rows whose largest logit was the right one.
    pub top1: u64,
    /// Rows with the right class among the five largest.
    pub top5: u64,
}

impl Tally {
    /// Counts rows of logits against their targets, with the cross-entropy of each row.
    pub fn count(&mut self, logits: &[f32], targets: &[i32]) {
        let classes = logits.len() / targets.len().max(1);
        for (row, &target) in logits.chunks_exact(classes.max(1)).zip(targets) {
            let place = place(row, target as usize);
            let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
            let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
            self.rows += 1;
            self.loss += sum.ln() - f64::from(row[target as usize] - max);
            self.top1 += u64::from(place < 1);
            self.top5 += u64::from(place < 5);
        }
    }

    /// Adds another tally.
    pub fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.loss += other.loss;
        self.top1 += other.top1;
        self.top5 += other.top5;
    }

    /// Mean loss.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.rows.max(1) as f64
    }

    /// Share of right answers.
    pub fn accuracy(&self) -> f64 {
        self.top1 as f64 / self.rows.max(1) as f64
    }

    /// Share of right answers among the five best.
    pub fn top5_accuracy(&self) -> f64 {
        self.top5 as f64 / self.rows.max(1) as f64
    }
}

/// How many logits stand before the target's: ties go to the lower class, and a NaN stands before everything.
fn place(row: &[f32], target: usize) -> usize {
    let value = row[target];
    let stands_before = |class: usize, x: f32| x > value || (x == value && class < target) || x.is_nan();
    if value.is_nan() {
        row.len()
    } else {
        row.iter().enumerate().filter(|&(class, &x)| stands_before(class, x)).count()
    }
}

/// The `k` largest entries of a row of logits as (class, probability), largest first.
pub fn top(row: &[f32], k: usize) -> Vec<(usize, f64)> {
    let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order.into_iter().take(k).map(|class| (class, f64::from(row[class] - max).exp() / sum)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_by_place() {
        let mut tally = Tally::default();
        let row = [0.0, 5.0, 4.0, 3.0, 2.0, 1.0];
        tally.count(&[row, row, row].concat(), &[1, 5, 0]);
        assert_eq!((tally.rows, tally.top1, tally.top5), (3, 1, 2));
    }

    #[test]
    fn the_loss_of_even_logits_is_the_log_of_the_classes() {
        let mut tally = Tally::default();
        tally.count(&[7.0; 10], &[3]);
        assert!((tally.mean_loss() - 10f64.ln()).abs() < 1e-12);
        assert_eq!(tally.top1, 0);
    }

    #[test]
    fn not_a_number_is_never_right() {
        let mut tally = Tally::default();
        tally.count(&[f32::NAN, 1.0], &[0]);
        tally.count(&[f32::NAN, 1.0], &[1]);
        assert_eq!(tally.top1, 0);
    }

    #[test]
    fn top_gives_probabilities_in_order() {
        let top = top(&[0.0, 2.0, 1.0], 2);
        assert_eq!([top[0].0, top[1].0], [1, 2]);
        assert!((top[0].1 - 2f64.exp() / (1.0 + 1f64.exp() + 2f64.exp())).abs() < 1e-12);
    }
}
