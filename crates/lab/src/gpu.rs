//! A rank's GPU over a whole run, in a handful of numbers: memory that does not grow with the run's length.

use paceline_system::event::GpuUse;

/// What the samples of a run come to. Each figure is over the samples that had it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct GpuTotals {
    busy: Mean,
    power_w: Mean,
    memory_used_bytes: Option<u64>,
    memory_bytes: Option<u64>,
    temperature_c: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Mean {
    sum: f64,
    count: u64,
    most: f64,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            (self.sum, self.count, self.most) = (self.sum + value, self.count + 1, self.most.max(value));
        }
    }

    fn get(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

impl GpuTotals {
    /// Adds what was seen.
    pub fn add(&mut self, seen: &GpuUse) {
        self.busy.add(seen.busy);
        self.power_w.add(seen.power_w);
        self.memory_used_bytes = self.memory_used_bytes.max(seen.memory_used_bytes);
        self.memory_bytes = seen.memory_bytes.or(self.memory_bytes);
        let hotter = seen.temperature_c.filter(|&now| self.temperature_c.is_none_or(|before| now > before));
        self.temperature_c = hotter.or(self.temperature_c);
    }

    /// Mean share of the time in which it computed.
    pub fn busy(&self) -> Option<f64> {
        self.busy.get()
    }

    /// The most memory that was taken, and what there is.
    pub fn memory(&self) -> Option<(u64, u64)> {
        self.memory_used_bytes.zip(self.memory_bytes)
    }

    /// Watts: the mean, and the most.
    pub fn power(&self) -> Option<(f64, f64)> {
        self.power_w.get().map(|mean| (mean, self.power_w.most))
    }

    /// The hottest it was.
    pub fn temperature(&self) -> Option<f64> {
        self.temperature_c
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_told_by_means_and_extremes() {
        let mut totals = GpuTotals::default();
        assert_eq!((totals.busy(), totals.memory(), totals.power(), totals.temperature()), (None, None, None, None));
        for (busy, used, watts, hot) in [(1.0, 5, 300.0, 70.0), (0.5, 9, 500.0, 60.0)] {
            totals.add(&GpuUse {
                busy: Some(busy),
                memory_used_bytes: Some(used),
                memory_bytes: Some(10),
                power_w: Some(watts),
                temperature_c: Some(hot),
            });
        }
        // What is missing or no number changes nothing.
        totals.add(&GpuUse { power_w: Some(f64::NAN), ..GpuUse::default() });
        assert_eq!((totals.busy(), totals.memory()), (Some(0.75), Some((9, 10))));
        assert_eq!((totals.power(), totals.temperature()), (Some((400.0, 500.0)), Some(70.0)));
    }
}
