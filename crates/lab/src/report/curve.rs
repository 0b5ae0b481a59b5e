//! Curves: fewer points that look the same, and a line through the noise.

/// One point of a curve: step and value.
pub(crate) type Point = (f64, f64);

/// Points that a curve is drawn with at most: two for each pixel of a wide chart.
pub(crate) const POINTS_MAX: usize = 2000;

/// At most `points_max` of `points` (four or more), with the first, the last, and of every bucket of neighbours the
/// lowest and the highest, so that no spike is lost. Values that are not numbers stay only where a whole bucket has no
/// other: there the curve has a gap.
pub(crate) fn downsample(points: &[Point], points_max: usize) -> Vec<Point> {
    assert!(points_max >= 4, "a curve of {points_max} points shows nothing");
    if points.len() <= points_max {
        return points.to_vec();
    }
    let inner = &points[1..points.len() - 1];
    let buckets = (points_max - 2) / 2;
    let mut kept = Vec::with_capacity(points_max);
    kept.push(points[0]);
    for bucket in 0..buckets {
        let range = bucket * inner.len() / buckets..(bucket + 1) * inner.len() / buckets;
        kept.extend(extremes(&inner[range]));
    }
    kept.push(points[points.len() - 1]);
    kept
}

/// The lowest and the highest of `bucket`, in the order they stand there.
fn extremes(bucket: &[Point]) -> impl Iterator<Item = Point> + use<> {
    let finite = |index: &usize| bucket[*index].1.is_finite();
    let by_value = |a: &usize, b: &usize| bucket[*a].1.total_cmp(&bucket[*b].1);
    let low = (0..bucket.len()).filter(finite).min_by(by_value);
    let high = (0..bucket.len()).filter(finite).max_by(by_value);
    let pair = match (low, high) {
        (Some(low), Some(high)) if low == high => [Some(bucket[low]), None],
        (Some(low), Some(high)) => [Some(bucket[low.min(high)]), Some(bucket[low.max(high)])],
        _ => [bucket.first().copied(), None],
    };
    pair.into_iter().flatten()
}

/// The mean of the `window` values around each point, fewer at the ends. It is centred, so that a change stands where it
/// happened and not half a window later. Values that are not numbers stay gaps and leave no trace in the mean.
pub(crate) fn smooth(points: &[Point], window: usize) -> Vec<Point> {
    let mut sums = Vec::with_capacity(points.len() + 1);
    sums.push((0.0, 0usize));
    for &(_, y) in points {
        let (sum, count) = sums[sums.len() - 1];
        sums.push(if y.is_finite() { (sum + y, count + 1) } else { (sum, count) });
    }
    let mean = |(index, &(x, y)): (usize, &Point)| {
        let (first, last) = (index.saturating_sub(window / 2), (index + window / 2 + 1).min(points.len()));
        let ((before, skipped), (sum, count)) = (sums[first], sums[last]);
        (x, if y.is_finite() { (sum - before) / (count - skipped) as f64 } else { f64::NAN })
    };
    points.iter().enumerate().map(mean).collect()
}

/// The window that suits a curve of `length` points: a fortieth of it, which leaves its shape and hides its noise.
pub(crate) fn window(length: usize) -> usize {
    (length / 40).clamp(1, 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_points_become_two_thousand_and_keep_their_spikes() {
        let mut points: Vec<Point> = (0..1_000_000).map(|x| (f64::from(x), (f64::from(x) * 1e-4).sin())).collect();
        points[123_456].1 = 50.0;
        points[765_432].1 = -50.0;
        let kept = downsample(&points, POINTS_MAX);
        assert!(kept.len() <= POINTS_MAX && kept.len() > POINTS_MAX / 2, "{}", kept.len());
        assert!(kept.contains(&points[123_456]) && kept.contains(&points[765_432]));
        assert_eq!((kept[0], kept[kept.len() - 1]), (points[0], points[999_999]));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0), "no point twice, in order");
    }

    #[test]
    fn few_points_stay_as_they_are() {
        let points = [(1.0, 2.0), (2.0, f64::NAN)];
        assert_eq!(downsample(&points, 4).len(), 2);
    }

    #[test]
    fn what_is_not_a_number_hides_no_number() {
        let points: Vec<Point> =
            (0..100).map(|x| (f64::from(x), if x % 2 == 0 || x > 50 { f64::NAN } else { 1.0 })).collect();
        let kept = downsample(&points, 12);
        assert!(kept[1..6].iter().all(|point| point.1 == 1.0), "{kept:?}");
        assert!(kept[7..].iter().all(|point| point.1.is_nan()), "{kept:?}");
    }

    #[test]
    fn smoothing_a_constant_changes_nothing_and_skips_gaps() {
        let points = [(1.0, 3.0), (2.0, f64::NAN), (3.0, 3.0)];
        let smoothed = smooth(&points, 10);
        assert!((smoothed[0].1 - 3.0).abs() < 1e-12 && smoothed[1].1.is_nan() && (smoothed[2].1 - 3.0).abs() < 1e-12);
        assert_eq!(smooth(&[(1.0, 5.0), (2.0, 7.0)], 1)[1].1, 7.0, "a window of one is the curve itself");
    }
}
