//! How long a step will take by each way to agree, over a link that is known: computing and messages as the plan of a step has them, each
//! beside the other. Pure arithmetic; `paceline plan --workers` prints it.
//!
//! Steps follow each other as in a run: a bucket leaves when its gradients are final, in the order of [`crate::schedule`], and the next
//! forward pass stops before the first node that reads parameters which are not back. What comes out is the time of a step when some have
//! passed. As in [`paceline_comm::cost`], adding is free, switches have room, and machines send and receive at the same time.

use paceline_comm::cost::{Link, seconds};
use paceline_comm::describe::plan;
use paceline_comm::{Algorithm, Choice, Collective};

use crate::schedule::{Expected, LinkSpeed, PIECE_ELEMENTS, pieces, schedule};

/// Steps after which a step takes what all later ones take, and those of which the mean is taken.
const WARM_STEPS: usize = 8;
const COUNTED_STEPS: usize = 8;

const ELEMENT_BYTES: usize = size_of::<f32>();

/// When things happen in a step that waits for nobody.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTimes {
    /// All of it.
    pub compute_s: f64,
    /// In the order in which they become final.
    pub buckets: Vec<BucketTimes>,
}

/// A bucket's moments, from the start of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketTimes {
    /// Its gradients are final.
    pub ready_s: f64,
    /// Its parameters are read.
    pub needed_s: f64,
    /// Its length.
    pub elements: usize,
}

/// A way to agree, and on which machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Sums of gradients to all workers.
    AllReduce,
    /// Sums to the owners of chunks, whose weights go to all.
    Sharded,
    /// Synchronous parameter servers with a machine each.
    Servers(usize),
    /// As many servers as workers, one on each worker's machine.
    ServersBeside,
    /// Steps of each worker's own, and all weights to all behind so many of them.
    Rounds(u64),
    /// Steps of each worker's own, and all weights to one server with a machine of its own and back, beside a step, once in so many.
    Center(u64),
}

/// What one machine sends and receives in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes out.
    pub sent: u64,
    /// Bytes in.
    pub received: u64,
}

/// What a way comes to.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Seconds of a step.
    pub step_s: f64,
    /// Those of them in which workers wait for messages.
    pub waits_s: f64,
    /// Machines that it takes.
    pub machines: usize,
    /// The algorithms that messages would go by, where workers send each other; by size there may be several.
    pub algorithms: Vec<Algorithm>,
    /// The busiest worker.
    pub worker: Traffic,
    /// The busiest server, where one has a machine for itself.
    pub server: Option<Traffic>,
}

/// Workers that agree over links of one kind.
#[derive(Clone, Debug)]
pub struct Workers {
    /// How many.
    pub count: usize,
    /// Between any two machines.
    pub link: Link,
    /// Which algorithm each collective takes.
    pub choice: Choice,
}

/// What a message takes: out to others, and back.
struct Legs {
    out_s: f64,
    back_s: f64,
}

impl Workers {
    /// What a step takes that way.
    pub fn forecast(&self, way: Way, times: &StepTimes) -> Forecast {
        let step_s = match way {
            Way::Rounds(every) => times.compute_s + self.all_at_once_s(times) / every as f64,
            // Beside a step, unless the server's link is busy with the others for longer than there are steps between.
            Way::Center(every) => {
                let elements: usize = times.buckets.iter().map(|bucket| bucket.elements).sum();
                let (Legs { out_s, back_s }, own) = (self.legs(Way::Servers(1), elements), elements * ELEMENT_BYTES);
                let late_s = 2.0 * self.link.message_s(own as f64) - times.compute_s;
                let busy_s = out_s.max(back_s) / every as f64;
                (times.compute_s + late_s.max(0.0) / every as f64).max(busy_s)
            }
            _ => self.step_s(way, times),
        };
        let lengths = || times.buckets.iter().map(|bucket| bucket.elements);
        let (machines, worker, server) = match way {
            Way::AllReduce => (self.count, self.collectives(&[Collective::AllReduce], lengths()), None),
            Way::Rounds(every) => {
                let all = std::iter::once(lengths().sum());
                let Traffic { sent, received } = self.collectives(&[Collective::AllReduce], all);
                (self.count, Traffic { sent: sent / every, received: received / every }, None)
            }
            Way::Sharded => {
                let both = [Collective::ReduceScatter, Collective::AllGather];
                (self.count, self.collectives(&both, lengths()), None)
            }
            Way::Servers(servers) => {
                let all: usize = lengths().sum();
                let parts: usize = lengths().map(|elements| elements.div_ceil(servers)).sum();
                (self.count + servers, even(all), Some(even(parts * self.count)))
            }
            Way::Center(every) => {
                let of = |elements: usize| {
                    let Traffic { sent, received } = even(elements);
                    Traffic { sent: sent / every, received: received / every }
                };
                let all: usize = lengths().sum();
                (self.count + 1, of(all), Some(of(all * self.count)))
            }
            Way::ServersBeside => {
                // To the servers of other machines, and from the own one to the workers there.
                let others = lengths().map(|elements| 2 * elements.div_ceil(self.count) * (self.count - 1));
                (self.count, even(others.sum()), None)
            }
        };
        let (waits_s, algorithms) = (step_s - times.compute_s, self.algorithms(way, times));
        Forecast { step_s, waits_s, machines, algorithms, worker, server }
    }

    /// Seconds of an all-reduce of all parameters, which hides behind nothing.
    fn all_at_once_s(&self, times: &StepTimes) -> f64 {
        let elements: usize = times.buckets.iter().map(|bucket| bucket.elements).sum();
        self.legs(Way::AllReduce, elements).out_s
    }

    fn algorithms(&self, way: Way, times: &StepTimes) -> Vec<Algorithm> {
        let collectives: &[Collective] = match way {
            Way::Rounds(_) => {
                let bytes = times.buckets.iter().map(|bucket| bucket.elements * ELEMENT_BYTES).sum();
                return vec![self.choice.algorithm(Collective::AllReduce, bytes)];
            }
            Way::AllReduce => &[Collective::AllReduce],
            Way::Sharded => &[Collective::ReduceScatter, Collective::AllGather],
            Way::Servers(_) | Way::ServersBeside | Way::Center(_) => &[],
        };
        let mut found = Vec::new();
        for piece in times.buckets.iter().flat_map(|bucket| pieces(bucket.elements)) {
            let of = |&collective: &Collective| self.choice.algorithm(collective, piece.len() * ELEMENT_BYTES);
            let new: Vec<Algorithm> =
                collectives.iter().map(of).filter(|algorithm| !found.contains(algorithm)).collect();
            found.extend(new);
        }
        found.dedup();
        found
    }

    /// Seconds of a step when some have passed.
    fn step_s(&self, way: Way, times: &StepTimes) -> f64 {
        let mut back = vec![0.0; times.buckets.len()];
        let (mut now, mut out_free, mut back_free, mut began) = (0.0, 0.0f64, 0.0f64, 0.0);
        for step in 0..WARM_STEPS + COUNTED_STEPS {
            if step == WARM_STEPS {
                began = now;
            }
            let (ready, end) = pass(now, times, &back);
            for message in schedule(&self.expected(way, times), self.speed(way)) {
                let Legs { out_s, back_s } = self.legs(way, message.range.len());
                let sent = out_free.max(ready[message.bucket]) + out_s;
                out_free = sent;
                // Where both directions of every link are busy with either leg, they follow each other.
                let returned = if matches!(way, Way::Servers(_)) { back_free.max(sent) } else { sent } + back_s;
                if matches!(way, Way::Servers(_)) {
                    back_free = returned
                } else {
                    out_free = returned
                }
                back[message.bucket] = returned;
            }
            now = end;
        }
        (now - began) / COUNTED_STEPS as f64
    }

    fn expected(&self, way: Way, times: &StepTimes) -> Vec<Expected> {
        let mut order: Vec<usize> = (0..times.buckets.len()).collect();
        order.sort_by(|&a, &b| times.buckets[a].needed_s.total_cmp(&times.buckets[b].needed_s));
        // Servers are walked bucket by bucket, as gradients become final.
        let by_need = matches!(way, Way::AllReduce | Way::Sharded);
        let need = |bucket: usize| order.iter().position(|&other| other == bucket).unwrap_or(0);
        let of = |(bucket, at): (usize, &BucketTimes)| Expected {
            ready_s: at.ready_s,
            need: if by_need { need(bucket) } else { bucket },
            elements: at.elements,
        };
        times.buckets.iter().enumerate().map(of).collect()
    }

    fn speed(&self, way: Way) -> LinkSpeed {
        let both = |elements| {
            let Legs { out_s, back_s } = self.legs(way, elements);
            out_s + back_s
        };
        let latency_s = both(0);
        LinkSpeed { latency_s, element_s: (both(PIECE_ELEMENTS) - latency_s) / PIECE_ELEMENTS as f64 }
    }

    fn legs(&self, way: Way, elements: usize) -> Legs {
        let (workers, bytes) = (self.count as f64, (elements * ELEMENT_BYTES) as f64);
        let collective = |collective| {
            let algorithm = self.choice.algorithm(collective, elements * ELEMENT_BYTES);
            seconds(collective, algorithm, self.choice.links(), elements * ELEMENT_BYTES)
        };
        match way {
            Way::AllReduce | Way::Rounds(_) => Legs { out_s: collective(Collective::AllReduce), back_s: 0.0 },
            Way::Sharded => {
                Legs { out_s: collective(Collective::ReduceScatter), back_s: collective(Collective::AllGather) }
            }
            Way::Center(_) => self.legs(Way::Servers(1), elements),
            Way::Servers(servers) => {
                // A worker's link carries all of it, a server's its part of each worker's.
                let busiest = bytes.max(workers * (elements.div_ceil(servers) * ELEMENT_BYTES) as f64);
                let leg_s = self.link.message_s(busiest);
                Legs { out_s: leg_s, back_s: leg_s }
            }
            Way::ServersBeside => {
                let leg_s = self.link.message_s(bytes * (workers - 1.0) / workers);
                Legs { out_s: leg_s, back_s: leg_s }
            }
        }
    }

    /// The busiest rank's traffic, as the lists of transfers have it.
    fn collectives(&self, collectives: &[Collective], lengths: impl Iterator<Item = usize>) -> Traffic {
        let mut ranks = vec![Traffic::default(); self.count];
        for elements in lengths {
            for &collective in collectives {
                let planned = plan(collective, &self.choice, elements, ELEMENT_BYTES);
                for (all, rank) in ranks.iter_mut().zip(planned.ranks) {
                    all.sent += rank.forecast.sent_bytes as u64;
                    all.received += rank.forecast.received_bytes as u64;
                }
            }
        }
        ranks.into_iter().max_by_key(|traffic| traffic.sent.max(traffic.received)).unwrap_or_default()
    }
}

/// A step that begins at `now`: when each bucket is ready, and when it ends, with stops for those that are not back.
fn pass(now: f64, times: &StepTimes, back: &[f64]) -> (Vec<f64>, f64) {
    let buckets = times.buckets.iter().enumerate();
    let mut needs: Vec<(f64, usize)> = buckets.map(|(bucket, at)| (at.needed_s, bucket)).collect();
    needs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut stops: Vec<(f64, f64)> = Vec::new();
    let mut stopped = 0.0;
    for (needed_s, bucket) in needs {
        stopped += (back[bucket] - (now + needed_s + stopped)).max(0.0);
        stops.push((needed_s, stopped));
    }
    let stopped_before =
        |at: f64| stops.iter().take_while(|(needed_s, _)| *needed_s <= at).last().map_or(0.0, |stop| stop.1);
    let ready = times.buckets.iter().map(|bucket| now + bucket.ready_s + stopped_before(bucket.ready_s)).collect();
    (ready, now + times.compute_s + stopped)
}

/// As many bytes in as out.
fn even(elements: usize) -> Traffic {
    let bytes = (elements * ELEMENT_BYTES) as u64;
    Traffic { sent: bytes, received: bytes }
}

#[cfg(test)]
mod tests;
