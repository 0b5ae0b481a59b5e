//! Messages to or from one neighbour, carried by a thread.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::threads;

use super::LinkShape;

/// Messages that can be announced ahead: more than a step has.
const ANNOUNCED_MAX: usize = 1 << 14;

type Carried = Result<Vec<f32>, CommError>;

/// What leaves.
#[derive(Debug)]
pub(super) struct Outbox {
    rank: Rank,
    full: Option<SyncSender<Vec<f32>>>,
    empty: Receiver<Carried>,
    thread: Option<JoinHandle<()>>,
}

/// What comes.
#[derive(Debug)]
pub(super) struct Inbox {
    rank: Rank,
    announced: Option<SyncSender<usize>>,
    arrived: Receiver<Carried>,
    empty: SyncSender<Vec<f32>>,
    thread: Option<JoinHandle<()>>,
}

fn buffers(shape: LinkShape) -> impl Iterator<Item = Vec<f32>> {
    (0..shape.messages.max(1)).map(move |_| Vec::with_capacity(shape.elements))
}

fn spawn(name: &str, rank: Rank, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CommError> {
    threads::spawn(name, body).map_err(|source| CommError::System { rank, what: "start a thread for messages", source })
}

impl Outbox {
    pub fn start(
        mut communicator: Communicator,
        to: Rank,
        shape: LinkShape,
        deadline: Duration,
    ) -> Result<Self, CommError> {
        communicator.set_timeout(deadline);
        let rank = communicator.world_rank(communicator.rank());
        let bound = shape.messages.max(1);
        let ((full, to_send), (sent, empty)) = (sync_channel::<Vec<f32>>(bound), sync_channel::<Carried>(bound + 1));
        buffers(shape).for_each(|buffer| drop(sent.try_send(Ok(buffer))));
        let thread = spawn("paceline-outbox", rank, move || {
            for (number, message) in to_send.iter().enumerate() {
                let carried = communicator.send(to, number as u64, bytemuck::cast_slice(&message));
                let failed = carried.is_err();
                if sent.send(carried.map(|()| message)).is_err() || failed {
                    return;
                }
            }
        })?;
        Ok(Self { rank, full: Some(full), empty, thread: Some(thread) })
    }

    /// A copy of the numbers leaves; waits only if all buffers are under way.
    pub fn send(&mut self, numbers: &[f32]) -> Result<(), CommError> {
        let mut message = self.empty.recv().map_err(|_| gone(self.rank))??;
        message.clear();
        message.extend_from_slice(numbers);
        let full = self.full.as_ref().expect("it is open until it is dropped");
        full.send(message).map_err(|_| gone(self.rank))
    }
}

impl Inbox {
    pub fn start(
        mut communicator: Communicator,
        from: Rank,
        shape: LinkShape,
        deadline: Duration,
    ) -> Result<Self, CommError> {
        communicator.set_timeout(deadline);
        let rank = communicator.world_rank(communicator.rank());
        let bound = shape.messages.max(1);
        let (announced, lengths) = sync_channel::<usize>(ANNOUNCED_MAX);
        let ((arrives, arrived), (empty, free)) = (sync_channel::<Carried>(bound + 1), sync_channel::<Vec<f32>>(bound));
        buffers(shape).for_each(|buffer| drop(empty.try_send(buffer)));
        let thread = spawn("paceline-inbox", rank, move || {
            for (number, length) in lengths.iter().enumerate() {
                let Ok(mut message) = free.recv() else { return };
                message.resize(length, 0.0);
                let carried = communicator.recv(from, number as u64, bytemuck::cast_slice_mut(&mut message));
                let failed = carried.is_err();
                if arrives.send(carried.map(|()| message)).is_err() || failed {
                    return;
                }
            }
        })?;
        Ok(Self { rank, announced: Some(announced), arrived, empty, thread: Some(thread) })
    }

    pub fn expect(&mut self, lengths: &[usize]) -> Result<(), CommError> {
        let announced = self.announced.as_ref().expect("it is open until it is dropped");
        lengths.iter().try_for_each(|&length| announced.send(length)).map_err(|_| self.failure())
    }

    pub fn receive(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        let message = self.arrived.recv().map_err(|_| gone(self.rank))??;
        numbers.copy_from_slice(&message);
        // The thread has ended only if it has failed, which the next receive tells.
        drop(self.empty.send(message));
        Ok(())
    }

    /// Why the thread has ended.
    fn failure(&mut self) -> CommError {
        self.arrived.iter().find_map(Result::err).unwrap_or_else(|| gone(self.rank))
    }
}

/// The error was told before.
fn gone(rank: Rank) -> CommError {
    CommError::Broken { rank, phase: "pipeline" }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        drop(self.full.take());
        if let Some(thread) = self.thread.take() {
            // What it failed with was told, or nobody asks any more.
            drop(thread.join());
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        drop(self.announced.take());
        // A message that was announced and never taken keeps the thread until the neighbour ends or its deadline is over.
        if let Some(thread) = self.thread.take().filter(JoinHandle::is_finished) {
            drop(thread.join());
        }
    }
}
