//! A histogram of how many updates steps had missed, where every worker's step is one of its own.

/// Updates missed that are told apart: a step that has missed more counts as one that has missed so many.
const MISSED_MAX: usize = 64;

/// How many steps had missed none, one, two, …
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed(Vec<u64>);

impl Default for Missed {
    fn default() -> Self {
        Self(vec![0; MISSED_MAX + 1])
    }
}

impl Missed {
    /// Counts a step that has missed so many.
    pub fn count(&mut self, missed: u64) {
        self.0[usize::try_from(missed).unwrap_or(MISSED_MAX).min(MISSED_MAX)] += 1;
    }

    /// The counts since this was last asked, up to the last that is not zero.
    pub fn take(&mut self) -> Vec<u64> {
        let known = self.0.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1);
        let counts = self.0[..known].to_vec();
        self.0.fill(0);
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_is_not_told_again() {
        let mut missed = Missed::default();
        [0, 2, 2, 1 << 40].into_iter().for_each(|count| missed.count(count));
        let told = missed.take();
        assert_eq!((&told[..3], told.len(), told[64]), (&[1, 0, 2][..], 65, 1));
        missed.count(1);
        assert_eq!((missed.take(), missed.take()), (vec![0, 1], vec![]));
    }
}
