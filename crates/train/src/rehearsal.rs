//! A run that is made to be timed: it trains as any other, ends when it has been long enough, and neither evaluates nor saves. `paceline
//! choose` starts such runs of every set-up.

/// How long such a run goes on: so many steps at least, and so many seconds behind the first one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rehearsal {
    /// Steps that are made in any case.
    pub steps: u64,
    /// Seconds behind the first step, if the steps do not take longer.
    pub seconds: f64,
    /// When the first step had ended.
    begun_s: Option<f64>,
}

impl Rehearsal {
    /// One that has not begun.
    pub const fn new(steps: u64, seconds: f64) -> Self {
        Self { steps, seconds, begun_s: None }
    }

    /// Takes notice of a step that has ended.
    pub fn stepped(&mut self, now_s: f64) {
        self.begun_s.get_or_insert(now_s);
    }

    /// Whether it has been long enough, with so many steps done.
    pub fn is_over(&self, steps: u64, now_s: f64) -> bool {
        steps >= self.steps && self.begun_s.is_some_and(|begun_s| now_s - begun_s >= self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_behind_its_steps_and_its_seconds() {
        let mut rehearsal = Rehearsal::new(3, 1.0);
        assert!(!rehearsal.is_over(0, 9.0), "the start does not count");
        rehearsal.stepped(9.0);
        rehearsal.stepped(9.2);
        assert!(!rehearsal.is_over(2, 12.0) && !rehearsal.is_over(50, 9.9) && rehearsal.is_over(3, 10.0));
    }
}
