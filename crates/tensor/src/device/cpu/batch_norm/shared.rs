//! Statistics over a batch whose parts are normalised in several places at once: each has the moments of its rows, and what
//! can be added up of them is.
//!
//! Forward: the sums, and from them the mean of all; then the squares about that mean, which follow from the moments of one's own
//! rows without looking at them again. Two sums of small numbers, because the one-sum formula, the mean square less the
//! square of the mean, loses digits where the mean is large. Backward: the two sums of the gradient. Places are weighted by their rows.

/// Adds up numbers, in place, with those that the other places have at the same moment. Every place calls it equally often, with
/// equally many numbers, and all get the same bits.
pub type Others<'a> = dyn FnMut(&mut [f32]) + 'a;

/// Turns means and variances of `count` rows into those of all rows, and returns how many those are.
pub(super) fn statistics(
    others: &mut Others<'_>,
    count: f64,
    (means, variances): (&mut [f64], &mut [f64]),
    numbers: &mut Vec<f32>,
) -> f64 {
    numbers.clear();
    numbers.extend(means.iter().map(|mean| (mean * count) as f32));
    numbers.push(count as f32);
    others(numbers);
    let all = f64::from(numbers.pop().expect("the count was put last"));
    for ((number, mean), variance) in numbers.iter_mut().zip(means).zip(&*variances) {
        // The mean that all work with is a number that all can write down.
        let mean_of_all = f64::from((f64::from(*number) / all) as f32);
        *number = (count * (variance + (*mean - mean_of_all).powi(2))) as f32;
        *mean = mean_of_all;
    }
    others(numbers);
    variances.iter_mut().zip(numbers).for_each(|(variance, number)| *variance = (f64::from(*number) / all).max(0.0));
    all
}

/// Turns sums over `count` rows into those over all rows, and returns how many those are.
pub(super) fn sums(others: &mut Others<'_>, count: f64, sums: &mut [f64], numbers: &mut Vec<f32>) -> f64 {
    numbers.clear();
    numbers.extend(sums.iter().map(|&sum| sum as f32));
    numbers.push(count as f32);
    others(numbers);
    let all = f64::from(numbers.pop().expect("the count was put last"));
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum = f64::from(*number));
    all
}
