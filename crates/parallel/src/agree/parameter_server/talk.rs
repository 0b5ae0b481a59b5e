//! What workers and servers say to each other, as lists of transfers: pure, and the two ends fit by
//! construction.
//!
//! Ranks below the number of workers are workers, the others servers. Server s holds part s of every bucket,
//! so that all servers have equal work and large tensors are split. A step is a conversation of B + 2 calls
//! for B buckets: the step's numbers, then each bucket while the new weights of the one before come back,
//! then the last one's weights. So both directions of a link are busy at once: a single server moves p·S in
//! while p·S go out.
//!
//! Every call begins with a word from the worker to each server, even if there is nothing to push: a server
//! that has heard it knows that the worker is in this call with all servers, so it never waits for one that
//! waits for another server.

use std::ops::Range;

use paceline_comm::Rank;
use paceline_comm::transfer::{Action, Transfer};

use super::super::{BucketShape, Exchange, Protocol, Roles, Shape};

/// One call: elements that are pushed, and elements whose weights come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The bucket whose gradients are pushed, in a step.
    pub pushes: Option<usize>,
    /// The bucket whose weights come back.
    pub pulls: Option<usize>,
    /// Elements to the servers.
    pub push: usize,
    /// Elements from them.
    pull: usize,
}

impl Call {
    /// The calls of a step, behind its report, as the protocol lists them.
    pub fn of_step(protocol: &Protocol, shape: &Shape) -> Vec<Self> {
        let elements = |bucket: Option<usize>| bucket.map_or(0, |bucket| shape.buckets[bucket].elements);
        let call = |exchange: &Exchange| match *exchange {
            Exchange::PushPull { push, pull } => {
                Some(Self { pushes: push, pulls: pull, push: elements(push), pull: elements(pull) })
            }
            Exchange::Report
            | Exchange::AllReduce { .. }
            | Exchange::ReduceScatter { .. }
            | Exchange::AllGather { .. } => None,
        };
        protocol.in_step.iter().filter_map(call).collect()
    }

    /// A call that asks and is answered at once, in two calls.
    pub fn pair(elements: usize) -> [Self; 2] {
        [Self { push: elements, ..Self::default() }, Self { pull: elements, ..Self::default() }]
    }

    /// Elements of a worker's buffer: what it pushes, what it pulls, a word for each server.
    pub fn worker_elements(&self, roles: Roles) -> usize {
        self.push + self.pull + roles.servers
    }

    /// Where the weights that come back stand in a worker's buffer.
    pub fn pulled(&self) -> Range<usize> {
        self.push..self.push + self.pull
    }

    /// A worker's part of the call. Server s adds what comes from worker w in step w.
    pub fn worker(&self, roles: Roles, worker: usize) -> Vec<Transfer> {
        let step = worker as u32;
        (0..roles.servers)
            .flat_map(|server| {
                let (push, pull) = (roles.part(self.push, server), roles.part(self.pull, server));
                let pull = self.push + pull.start..self.push + pull.end;
                let (peer, word) = (roles.server(server), self.push + self.pull + server);
                [
                    transfer(step, Action::Send, peer, word..word + 1),
                    transfer(step, Action::Send, peer, push),
                    transfer(step, Action::Receive, peer, pull),
                ]
            })
            .flatten()
            .collect()
    }

    /// A server's part: `workers` are those who take part, and what they push is added up if there are
    /// several.
    pub fn server(&self, roles: Roles, server: usize, workers: impl Iterator<Item = usize>) -> Vec<Transfer> {
        let (push, pull) = (roles.part(self.push, server).len(), roles.part(self.pull, server).len());
        workers
            .enumerate()
            .flat_map(|(index, worker)| {
                let (step, peer) = (worker as u32, Rank::at(worker));
                let take = if index == 0 { Action::Receive } else { Action::Reduce };
                let word = push + pull;
                [
                    transfer(step, Action::Receive, peer, word..word + 1),
                    transfer(step, take, peer, 0..push),
                    transfer(step, Action::Send, peer, push..push + pull),
                ]
            })
            .flatten()
            .collect()
    }

    /// Elements of a server's buffer: what it is given, then what it gives; a word follows.
    pub fn server_elements(&self, roles: Roles, server: usize) -> [usize; 2] {
        [roles.part(self.push, server).len(), roles.part(self.pull, server).len()]
    }
}

/// A worker's part when weights or the optimizer's state come whole: every server's part of every bucket,
/// where it belongs.
pub(super) fn all_of_worker(roles: Roles, buckets: &[BucketShape], worker: usize) -> Vec<Transfer> {
    let from = |server| parts(roles, buckets, server, (worker as u32, Action::Receive, roles.server(server)));
    (0..roles.servers).flat_map(from).collect()
}

/// A server's part of the same, with some workers.
pub(super) fn all_of_server(
    roles: Roles,
    buckets: &[BucketShape],
    server: usize,
    workers: Range<usize>,
) -> Vec<Transfer> {
    workers.flat_map(|worker| parts(roles, buckets, server, (worker as u32, Action::Send, Rank::at(worker)))).collect()
}

fn parts(
    roles: Roles,
    buckets: &[BucketShape],
    server: usize,
    (step, action, peer): (u32, Action, Rank),
) -> Vec<Transfer> {
    let part = |bucket: &BucketShape| {
        let part = roles.part(bucket.elements, server);
        transfer(step, action, peer, bucket.start + part.start..bucket.start + part.end)
    };
    buckets.iter().filter_map(part).collect()
}

fn transfer(step: u32, action: Action, peer: Rank, range: Range<usize>) -> Option<Transfer> {
    (!range.is_empty()).then_some(Transfer { step, action, peer, start: range.start, length: range.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_step(lengths: &[usize]) -> Vec<Call> {
        let bucket = |&elements: &usize| BucketShape { start: 0, elements, ready_after: 0, needed_before: 0 };
        let shape = Shape { buckets: lengths.iter().map(bucket).collect(), ..Shape::default() };
        Call::of_step(&Protocol::parameter_server(lengths.len()), &shape)
    }

    #[test]
    fn both_ends_of_every_call_fit() {
        for (workers, servers) in [(1, 1), (2, 1), (3, 2), (6, 1), (4, 4), (2, 5)] {
            let roles = Roles { workers, servers };
            for call in of_step(&[1000, 1, 0, 77]) {
                for server in 0..servers {
                    let heard = call.server(roles, server, 0..workers);
                    for worker in 0..workers {
                        let said = call.worker(roles, worker);
                        let of = |list: &[Transfer], peer: Rank| -> Vec<(bool, u32, usize)> {
                            let mine = list.iter().filter(|transfer| transfer.peer == peer);
                            mine.map(|t| (t.action == Action::Send, t.step, t.length)).collect()
                        };
                        let there = of(&said, roles.server(server));
                        let here = of(&heard, Rank::at(worker));
                        let turned: Vec<_> = here.iter().map(|&(send, step, length)| (!send, step, length)).collect();
                        assert_eq!(there, turned);
                    }
                }
            }
        }
    }

    #[test]
    fn a_step_pushes_and_pulls_every_bucket_once() {
        let calls = of_step(&[5, 6, 7]);
        assert_eq!(calls.iter().map(|call| call.push).collect::<Vec<_>>(), [5, 6, 7, 0]);
        assert_eq!(calls.iter().map(|call| call.pulled().len()).collect::<Vec<_>>(), [0, 5, 6, 7]);
    }
}
