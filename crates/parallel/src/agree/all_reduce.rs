//! All-reduce: the gradients of all ranks are summed, bucket by bucket, while the backward pass goes on.
//!
//! The messages of a step follow a list ([`crate::schedule`]). Sums come back at any time; they are applied when the next forward pass
//! needs the parameters, at the latest. After the first steps, rank 0's times decide the order for all ranks. Per rank 2(p−1)/p of
//! the gradients' bytes are sent and received with a ring.

use std::time::Duration;

use paceline_comm::{CommError, Communicator, Rank, RegisteredBuffer};
use paceline_system::clock::Clock;

use super::courier::{Answer, BucketShape, Courier, Ends, Job};
use crate::schedule::{Expected, Message, Pace, schedule};

/// Joins the agreement; all ranks have the same buckets.
///
/// # Errors
/// When the operating system refuses a thread or memory.
pub(super) fn start(
    mut communicator: Communicator,
    buckets: &[BucketShape],
    deadline: Duration,
) -> Result<Courier, CommError> {
    let memory: Result<Vec<RegisteredBuffer>, CommError> =
        buckets.iter().map(|bucket| communicator.register_buffer(bucket.elements)).collect();
    let who = (communicator.rank(), communicator.world(), "all-reduce");
    let mut carrier = Carrier { communicator, buckets: buckets.to_vec(), clock: Clock::real() };
    Courier::start(who, memory?, deadline, move |ends| carrier.run(ends))
}

/// What the thread owns.
struct Carrier {
    communicator: Communicator,
    buckets: Vec<BucketShape>,
    clock: Clock,
}

/// A step under way.
struct Step {
    order: Vec<Message>,
    /// The next message.
    next: usize,
    buckets: Vec<Option<RegisteredBuffer>>,
    /// Elements that were carried, in how many seconds.
    carried: (usize, f64),
}

impl Carrier {
    /// Carries steps until there are no more jobs.
    fn run(&mut self, ends: &Ends) -> Result<(), CommError> {
        let at_once = Pace { latency_s: 0.0, element_s: 0.0 };
        let order = schedule(&self.expected(|bucket| bucket.ready_after as f64), at_once);
        let buckets = self.buckets.iter().map(|_| None).collect();
        let mut step = Step { order, next: 0, buckets, carried: (0, 0.0) };
        while let Ok(job) = ends.jobs.recv() {
            match job {
                Job::Reorder(ready) => step.order = self.reorder(ready, step.carried)?,
                Job::Share(mut numbers) => {
                    self.communicator.all_reduce(&mut numbers)?;
                    ends.answer(Answer::Shared(numbers));
                    (step.next, step.carried) = (0, (0, 0.0));
                }
                Job::Sum(mut numbers) => {
                    self.communicator.all_reduce(&mut numbers)?;
                    ends.answer(Answer::Numbers(numbers));
                }
                Job::First(mut numbers) => {
                    self.communicator.broadcast(Rank(0), &mut numbers)?;
                    ends.answer(Answer::Numbers(numbers));
                }
                Job::State(state) => ends.answer(Answer::State(state)),
                Job::Weights(weights) => ends.answer(Answer::Numbers(weights)),
                Job::Bucket(bucket, memory) => step.buckets[bucket] = Some(memory),
            }
            while self.carry(&mut step, ends)? {}
        }
        Ok(())
    }

    /// Carries the next message if its bucket is there; whether it was.
    fn carry(&mut self, step: &mut Step, ends: &Ends) -> Result<bool, CommError> {
        let Some(Message { bucket, range }) = step.order.get(step.next) else { return Ok(false) };
        let Some(memory) = &mut step.buckets[*bucket] else { return Ok(false) };
        let start = self.clock.seconds();
        self.communicator.all_reduce_registered(memory, range.clone())?;
        let seconds = self.clock.seconds() - start;
        step.carried = (step.carried.0 + range.len(), step.carried.1 + seconds);
        step.next += 1;
        if range.end == self.buckets[*bucket].elements
            && let Some(memory) = step.buckets[*bucket].take()
        {
            ends.answer(Answer::Bucket(*bucket, memory));
        }
        Ok(true)
    }

    fn expected(&self, ready: impl Fn(&BucketShape) -> f64) -> Vec<Expected> {
        let of = |bucket: &BucketShape| Expected {
            ready_s: ready(bucket),
            need: bucket.needed_before,
            elements: bucket.elements,
        };
        self.buckets.iter().map(of).collect()
    }

    /// The order that follows from rank 0's times.
    fn reorder(&mut self, ready: Vec<f32>, (elements, seconds): (usize, f64)) -> Result<Vec<Message>, CommError> {
        let mut times = ready;
        times.push((seconds / elements.max(1) as f64) as f32);
        self.communicator.broadcast(Rank(0), &mut times)?;
        let element_s = f64::from(times.pop().unwrap_or(0.0));
        let mut expected = self.expected(|_| 0.0);
        expected.iter_mut().zip(times).for_each(|(expected, time)| expected.ready_s = f64::from(time));
        Ok(schedule(&expected, Pace { latency_s: 0.0, element_s }))
    }
}
