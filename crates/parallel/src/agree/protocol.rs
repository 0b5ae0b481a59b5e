//! What an agreement sends, as a value: one list for each part of a run, from which workers and servers both
//! derive what they send and what they expect. Two ends that walk one list cannot expect different things.

use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::memory;

use super::Shape;

/// What travels between the ranks of a run, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// The name on the command line.
    pub name: &'static str,
    /// Broadcast by rank 0 to all workers and servers before the first step, in this order, after the run's
    /// identity.
    pub opening: Vec<Opening>,
    /// Who makes the steps.
    pub steps: Steps,
    /// The exchanges of one step, in order.
    pub in_step: Vec<Exchange>,
    /// What workers may ask for between two steps.
    pub between: Vec<Between>,
    /// What a worker says at the end.
    pub closing: Option<Closing>,
    /// What the loss of a peer means for the others.
    pub lost_peer: LostPeer,
    /// What somebody who joins later is sent: by servers where there are some, and otherwise by rank 0.
    pub joiner: Vec<Opening>,
}

/// A tensor, or several, that all ranks are given by rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// What is kept and not trained: running statistics.
    States,
    /// The parameters.
    Weights,
    /// Every buffer of the optimizer's state.
    Optimizer,
    /// What the agreement keeps of its own.
    Kept {
        /// So many buffers, each as long as the parameters.
        buffers: usize,
    },
}

/// What all agreements begin with.
pub const OPENING: [Opening; 3] = [Opening::States, Opening::Weights, Opening::Optimizer];

/// What a worker is given that comes back to servers. Whose optimizer is its own begins it anew.
pub const RETURNED: [Opening; 2] = [Opening::States, Opening::Weights];

/// Who makes the steps, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// Every worker, with its own gradients. Weights are exchanged where a round ends, or never.
    Local {
        /// After which steps.
        rounds: Option<Rounds>,
    },
    /// Every worker, with its own gradients. Each exchanges weights, or their changes, with a centre that servers hold,
    /// beside its steps.
    Center {
        /// Once in so many.
        every: u64,
    },
    /// Every worker, with the sum of the gradients of its group, which is one worker to the centre.
    Groups {
        /// The group exchanges once in so many steps.
        every: u64,
    },
    /// Every worker, with the sum of all gradients.
    Sums,
    /// Every worker for its own chunk of every bucket, with the sum of all gradients there; the others are given
    /// its weights.
    Chunks,
    /// Servers; their weights replace the workers'.
    Servers,
    /// Servers, with the gradients of a whole batch of portions, between which the weights stand still.
    Gathered,
}

impl Steps {
    /// Whether every worker makes its own, with its own gradients.
    pub const fn are_own(self) -> bool {
        matches!(self, Self::Local { .. } | Self::Center { .. })
    }
}

/// After which steps workers that make their own exchange weights: known to all, so that nobody asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// Steps between two exchanges of all workers; none if all exchange only where somebody looks at the weights.
    pub every: Option<u64>,
    /// Steps between two exchanges of the workers of each machine.
    pub within_node: Option<u64>,
    /// So many steps at the beginning of a run are each followed by an exchange of all.
    pub warm_up: u64,
    /// Parts of the weights that are exchanged one after the other in the steps between; one if all are exchanged at
    /// once.
    pub fragments: u64,
}

/// Who exchanges weights at the end of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The workers of each machine among themselves.
    Node,
    /// All workers a part of their weights.
    Fragment {
        /// Its number.
        index: u64,
    },
    /// All workers.
    All,
}

impl Rounds {
    /// Who exchanges weights when so many steps were made since the beginning of the run.
    pub fn after(self, steps: u64) -> Option<Reach> {
        if steps <= self.warm_up {
            return Some(Reach::All);
        }
        if let Some(every) = self.every {
            // Each at its own step of a round, the last where it ends.
            let due = |index: &u64| (index + 1) * every / self.fragments == (steps - 1) % every + 1;
            if let Some(index) = (0..self.fragments).find(due) {
                return Some(if self.fragments == 1 { Reach::All } else { Reach::Fragment { index } });
            }
        }
        self.within_node.filter(|&every| steps.is_multiple_of(every)).map(|_| Reach::Node)
    }
}

/// One exchange of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// The step's reports are added up.
    Report,
    /// The gradients of a bucket are added up over all workers.
    AllReduce {
        /// Its number.
        bucket: usize,
    },
    /// The gradients of a bucket are added up, each rank's chunk for that rank.
    ReduceScatter {
        /// Its number.
        bucket: usize,
    },
    /// Every rank's chunk of the new weights of a bucket goes to all.
    AllGather {
        /// Its number.
        bucket: usize,
    },
    /// Gradients go to the servers while the weights of an earlier bucket come back: both directions of a
    /// link are busy.
    PushPull {
        /// The bucket whose gradients are pushed.
        push: Option<usize>,
        /// The bucket whose weights are pulled.
        pull: Option<usize>,
    },
}

/// What workers may do together between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// Add up numbers: running statistics, an evaluation's counts.
    Sum,
    /// Fetch all weights.
    Weights,
    /// Fetch the optimizer's state, to be saved by rank 0.
    Optimizer,
}

/// How a worker leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// It tells the servers, which wait for it no longer.
    Goodbye,
}

/// What the others do when a peer is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostPeer {
    /// The run ends, and a survivor saves the last whole step.
    End,
    /// They go on without it.
    GoOn,
}

impl Protocol {
    /// Nothing travels: one worker, which makes its own steps.
    pub const fn alone() -> Self {
        Self {
            name: "alone",
            opening: Vec::new(),
            steps: Steps::Local { rounds: None },
            in_step: Vec::new(),
            between: Vec::new(),
            closing: None,
            lost_peer: LostPeer::End,
            joiner: Vec::new(),
        }
    }

    /// Sums of gradients, bucket by bucket.
    pub fn all_reduce(buckets: usize) -> Self {
        let sums = (0..buckets).map(|bucket| Exchange::AllReduce { bucket });
        Self {
            name: "all-reduce",
            opening: OPENING.to_vec(),
            steps: Steps::Sums,
            in_step: [Exchange::Report].into_iter().chain(sums).collect(),
            between: vec![Between::Sum],
            closing: None,
            lost_peer: LostPeer::End,
            joiner: OPENING.to_vec(),
        }
    }

    /// Sums of gradients to the owners of chunks, as buckets become final, and then their weights to all, in the
    /// order `needed` of the next forward pass. Every worker begins with its own chunks of the optimizer's
    /// state, which are never with rank 0.
    pub fn sharded(buckets: usize, needed: impl IntoIterator<Item = usize>) -> Self {
        let sums = (0..buckets).map(|bucket| Exchange::ReduceScatter { bucket });
        let weights = needed.into_iter().map(|bucket| Exchange::AllGather { bucket });
        let opening = vec![Opening::States, Opening::Weights];
        Self {
            opening: opening.clone(),
            steps: Steps::Chunks,
            in_step: [Exchange::Report].into_iter().chain(sums).chain(weights).collect(),
            between: vec![Between::Sum, Between::Optimizer],
            joiner: opening,
            ..Self::all_reduce(buckets)
        }
    }

    /// Gradients to servers and weights back, one bucket behind.
    pub fn parameter_server(buckets: usize) -> Self {
        let push_pull =
            |index: usize| Exchange::PushPull { push: (index < buckets).then_some(index), pull: index.checked_sub(1) };
        Self {
            name: "parameter-server",
            opening: OPENING.to_vec(),
            steps: Steps::Servers,
            in_step: [Exchange::Report].into_iter().chain((0..=buckets).map(push_pull)).collect(),
            between: vec![Between::Sum, Between::Weights, Between::Optimizer],
            closing: Some(Closing::Goodbye),
            lost_peer: LostPeer::End,
            joiner: RETURNED.to_vec(),
        }
    }

    /// Nothing in a step; weights where a round ends. What workers keep for that beside the weights, `buffers` of
    /// their length, is rank 0's at the opening.
    pub fn local(name: &'static str, rounds: Rounds, buffers: usize) -> Self {
        let opening: Vec<Opening> =
            OPENING.into_iter().chain((buffers > 0).then_some(Opening::Kept { buffers })).collect();
        Self {
            name,
            opening: opening.clone(),
            steps: Steps::Local { rounds: Some(rounds) },
            in_step: Vec::new(),
            between: vec![Between::Sum],
            closing: None,
            lost_peer: LostPeer::End,
            joiner: opening,
        }
    }

    /// Nothing in a step's list; exchanges with a centre beside steps, once in `every`. What servers keep for that
    /// beside the centre, `buffers` of the parameters' length, is rank 0's at the opening.
    pub fn center(name: &'static str, every: u64, buffers: usize) -> Self {
        let rounds = Rounds { every: Some(every), within_node: None, warm_up: 0, fragments: 1 };
        Self {
            steps: Steps::Center { every },
            between: vec![Between::Sum, Between::Weights],
            closing: Some(Closing::Goodbye),
            lost_peer: LostPeer::GoOn,
            joiner: RETURNED.to_vec(),
            ..Self::local(name, rounds, buffers)
        }
    }

    /// The same of groups of workers, each of which adds up its gradients and steps as one. A group that has lost one is
    /// lost as a whole.
    pub fn in_groups(self, buckets: usize) -> Self {
        let Steps::Center { every } = self.steps else { return self };
        let Self { in_step, .. } = Self::all_reduce(buckets);
        Self { steps: Steps::Groups { every }, in_step, ..self }
    }

    /// Nothing in a step; gradients where all meet.
    pub fn gathered(name: &'static str) -> Self {
        let opening = vec![Opening::States, Opening::Weights];
        Self {
            opening: opening.clone(),
            steps: Steps::Gathered,
            between: vec![Between::Sum, Between::Weights],
            joiner: opening,
            ..Self::center(name, 1, 0)
        }
    }

    /// Receives what the first worker gives to all, at a server of a centre: which it is, which of several, and its
    /// numbers.
    ///
    /// # Errors
    /// When the first worker, or the way to it, has failed.
    pub(super) fn receive_opening(
        &self,
        communicator: &mut Communicator,
        shape: &Shape,
        mut keep: impl FnMut(Opening, usize, &[f32]),
    ) -> Result<(), CommError> {
        for &opening in &self.opening {
            let (length, times) = match opening {
                Opening::States => (shape.states, 1),
                Opening::Weights => (shape.parameters, 1),
                Opening::Optimizer => (shape.parameters, shape.slots),
                Opening::Kept { buffers } => (shape.parameters, buffers),
            };
            for index in 0..if length > 0 { times } else { 0 } {
                let all = memory::zeros(length, "what a run begins with");
                let mut all = all.unwrap_or_else(|refused| refused.unwind());
                communicator.broadcast(Rank(0), &mut all)?;
                keep(opening, index, &all);
            }
        }
        Ok(())
    }

    /// Buffers that the agreement keeps, each as long as the parameters, which checkpoints have too.
    pub fn buffers(&self) -> usize {
        let kept = |opening: &Opening| if let Opening::Kept { buffers } = opening { Some(*buffers) } else { None };
        self.opening.iter().find_map(kept).unwrap_or(0)
    }

    /// Whether gradients of a step leave a worker's device by the host.
    pub fn gradients_leave(&self) -> bool {
        self.in_step.iter().any(|exchange| !matches!(exchange, Exchange::Report))
    }

    /// Whether workers may do this between two steps.
    pub fn allows(&self, between: Between) -> bool {
        self.between.contains(&between)
    }
}

/// Ranks by what they do: workers first, then servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Ranks from 0.
    pub workers: usize,
    /// Ranks behind them.
    pub servers: usize,
}

impl Roles {
    /// The rank of a server.
    pub fn server(&self, index: usize) -> Rank {
        Rank::at(self.workers + index)
    }

    /// The worker whose loss an error tells of, if the others can do without it: the first one has what nobody else has.
    pub fn missed(&self, error: &CommError) -> Option<usize> {
        let lost = error.peer().map(Rank::index).filter(|_| matches!(error, CommError::PeerGone { .. }));
        lost.filter(|worker| (1..self.workers).contains(worker))
    }

    /// A server's part of so many elements.
    pub fn part(&self, elements: usize, server: usize) -> std::ops::Range<usize> {
        paceline_comm::transfer::chunk(elements, self.servers, server)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bucket_is_pushed_once_and_pulled_once_later() {
        for buckets in 0..5 {
            let protocol = Protocol::parameter_server(buckets);
            let mut pushed = Vec::new();
            let mut pulled = Vec::new();
            for exchange in &protocol.in_step {
                let Exchange::PushPull { push, pull } = exchange else { continue };
                if let Some(bucket) = pull {
                    assert!(pushed.contains(bucket), "weights come back after their gradients went");
                    pulled.push(*bucket);
                }
                pushed.extend(push);
            }
            let all: Vec<usize> = (0..buckets).collect();
            assert_eq!((pushed, pulled), (all.clone(), all));
        }
    }

    #[test]
    fn rounds_end_where_all_know_they_do() {
        let rounds = Rounds { every: Some(6), within_node: Some(2), warm_up: 3, fragments: 1 };
        let ends: Vec<Option<Reach>> = (1..=12).map(|steps| rounds.after(steps)).collect();
        let (all, node) = (Some(Reach::All), Some(Reach::Node));
        assert_eq!(ends, [all, all, all, node, None, all, None, node, None, node, None, all]);
        let flat = Rounds { every: Some(4), within_node: None, warm_up: 0, fragments: 1 };
        assert_eq!((1..=8).filter(|&steps| flat.after(steps) == all).collect::<Vec<_>>(), [4, 8]);
        let never = Rounds { every: None, ..flat };
        assert!((1..=8).all(|steps| never.after(steps).is_none()));
    }

    #[test]
    fn every_fragment_is_exchanged_once_in_a_round_and_each_at_a_step_of_its_own() {
        for every in 1..20 {
            for fragments in 2..=every {
                let rounds = Rounds { every: Some(every), within_node: None, warm_up: 0, fragments };
                for round in 0..3 {
                    let due: Vec<Reach> = (1..=every).filter_map(|step| rounds.after(round * every + step)).collect();
                    assert_eq!(due, (0..fragments).map(|index| Reach::Fragment { index }).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn what_all_get_at_the_opening_is_what_a_joiner_is_sent() {
        for protocol in [Protocol::all_reduce(3), Protocol::sharded(3, [2, 1, 0])] {
            assert_eq!(protocol.opening, protocol.joiner);
            assert_eq!(protocol.in_step[0], Exchange::Report);
        }
        // Servers keep the optimizer, or each worker has its own.
        for protocol in [Protocol::parameter_server(3), Protocol::center("elastic", 4, 1)] {
            assert_eq!(protocol.joiner, RETURNED);
        }
    }
}
