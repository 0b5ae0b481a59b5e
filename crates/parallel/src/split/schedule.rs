//! A schedule: the tasks of each stage in the order in which it runs them, and where each micro-batch's
//! activations are kept. The interpreter of stages walks it.

use super::{Kind, Pass, StageTimes, Task, zero_bubble};

/// What every stage does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub(super) kind: Kind,
    pub(super) micro_batches: usize,
    /// Of each stage.
    pub(super) tasks: Vec<Vec<Task>>,
    /// Of each stage and micro-batch.
    slots: Vec<Vec<usize>>,
}

impl Schedule {
    /// A schedule of as many stages as there are times; only zero bubbles are made from their values.
    /// Messages between stages take no time.
    ///
    /// # Panics
    /// Without a stage or a micro-batch, or when a time is negative or no number: bugs.
    pub fn new(kind: Kind, micro_batches: usize, times: &[StageTimes]) -> Self {
        Self::with_transfers(kind, micro_batches, times, &vec![0.0; times.len().saturating_sub(1)])
    }

    /// As `new`, where one message between stage k and the next takes `transfer_s[k]`, in either direction.
    ///
    /// # Panics
    /// As `new`, and when the times of boundaries are not one fewer than stages.
    pub fn with_transfers(kind: Kind, micro_batches: usize, times: &[StageTimes], transfer_s: &[f64]) -> Self {
        let stages = times.len();
        assert!(micro_batches > 0 && stages > 0, "a schedule has a stage and a micro-batch");
        let tasks = match kind {
            Kind::GPipe => vec![one_forward_one_backward(micro_batches, micro_batches); stages],
            Kind::OneForwardOneBackward => {
                (0..stages).map(|stage| one_forward_one_backward(stages - stage - 1, micro_batches)).collect()
            }
            Kind::ZeroBubble => zero_bubble::lists(micro_batches, times, transfer_s),
        };
        let schedule = Self::from_tasks(kind, micro_batches, tasks);
        if let Err(problem) = schedule.verify() {
            panic!("{kind} of {stages} stages and {micro_batches} micro-batches: {problem}");
        }
        schedule
    }

    /// A schedule of any lists, which nobody has verified.
    pub(super) fn from_tasks(kind: Kind, micro_batches: usize, tasks: Vec<Vec<Task>>) -> Self {
        let last = if kind.separates_gradients() { Pass::Weights } else { Pass::Backward };
        let slots = tasks.iter().map(|tasks| slots(tasks, micro_batches, last)).collect();
        Self { kind, micro_batches, tasks, slots }
    }

    /// Which kind it is.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Micro-batches of a step.
    pub const fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// How many stages there are.
    pub const fn stages(&self) -> usize {
        self.tasks.len()
    }

    /// What a stage does, in this order.
    pub fn tasks(&self, stage: usize) -> &[Task] {
        &self.tasks[stage]
    }

    /// Whether gradients of weights have tasks of their own.
    pub const fn separates_gradients(&self) -> bool {
        self.kind.separates_gradients()
    }

    /// Micro-batches whose activations a stage keeps at once, each from its forward pass to its last
    /// gradient.
    pub fn slots(&self, stage: usize) -> usize {
        self.slots[stage].iter().max().map_or(0, |slot| slot + 1)
    }

    /// Where a stage keeps the activations of a micro-batch: the lowest slot that is free when its forward
    /// pass begins.
    pub fn slot(&self, stage: usize, micro_batch: usize) -> usize {
        self.slots[stage][micro_batch]
    }
}

/// So many forward passes first, then a forward and a backward pass in turn, then what is left to go back.
fn one_forward_one_backward(warm_up: usize, micro_batches: usize) -> Vec<Task> {
    let warm_up = warm_up.min(micro_batches);
    let forward = |micro_batch| Task { micro_batch, pass: Pass::Forward };
    let backward = |micro_batch| Task { micro_batch, pass: Pass::Backward };
    let pairs = (warm_up..micro_batches).flat_map(|next| [forward(next), backward(next - warm_up)]);
    let drain = (micro_batches - warm_up..micro_batches).map(backward);
    (0..warm_up).map(forward).chain(pairs).chain(drain).collect()
}

fn slots(tasks: &[Task], micro_batches: usize, last: Pass) -> Vec<usize> {
    let mut slots = vec![0; micro_batches];
    let mut taken: Vec<bool> = Vec::new();
    for task in tasks {
        if task.pass == Pass::Forward {
            let slot = taken.iter().position(|taken| !taken).unwrap_or(taken.len());
            taken.resize(taken.len().max(slot + 1), false);
            taken[slot] = true;
            slots[task.micro_batch] = slot;
        } else if task.pass == last
            && let Some(taken) = taken.get_mut(slots[task.micro_batch])
        {
            *taken = false;
        }
    }
    slots
}
