//! A fragment's exchange beside the steps that follow: a thread adds it up over all workers while they are computed.
//!
//! One fragment is under way at a time. What its worker changes of it meanwhile stays added to what comes back *(ours)*.

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::error::Party;
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::threads;

/// The name in errors, and the thread's.
const PHASE: &str = "fragment";

/// The thread, and the fragment that it adds up.
#[derive(Debug)]
pub(super) struct Stream {
    rank: Rank,
    numbers: Option<SyncSender<Vec<f32>>>,
    sums: Receiver<Result<Vec<f32>, CommError>>,
    thread: Option<JoinHandle<()>>,
    deadline: Duration,
    /// Where the fragment is among the weights, and what it was when it left.
    under_way: Option<Range<usize>>,
    sent: Vec<f32>,
    /// Memory of a fragment, while none is under way.
    spare: Vec<f32>,
}

impl Stream {
    pub fn start(mut communicator: Communicator, deadline: Duration) -> Result<Self, CommError> {
        let rank = communicator.rank();
        let ((numbers, inbox), (outbox, sums)) = (sync_channel::<Vec<f32>>(1), sync_channel(1));
        let body = move || {
            while let Ok(mut numbers) = inbox.recv() {
                let summed = communicator.all_reduce(&mut numbers);
                let failed = summed.is_err();
                if outbox.send(summed.map(|()| numbers)).is_err() || failed {
                    return;
                }
            }
        };
        let thread =
            threads::spawn(PHASE, body).map_err(|source| CommError::System { rank, what: "start a thread", source })?;
        let (numbers, thread, sent, spare) = (Some(numbers), Some(thread), Vec::new(), Vec::new());
        Ok(Self { rank, numbers, sums, thread, deadline, under_way: None, sent, spare })
    }

    /// Has a fragment of the weights added up.
    pub fn begin(&mut self, range: Range<usize>, weights: &[f32]) {
        self.sent.clear();
        self.sent.extend_from_slice(&weights[range.clone()]);
        let mut numbers = std::mem::take(&mut self.spare);
        numbers.clear();
        numbers.extend_from_slice(&self.sent);
        if let Some(to) = &self.numbers {
            // Where the thread has failed, what is waited for says why.
            let _ = to.send(numbers);
        }
        self.under_way = Some(range);
    }

    /// Waits for the fragment that is under way. `outcome` makes of the sums what the fragment is from now on.
    pub fn end(
        &mut self,
        weights: &mut [f32],
        outcome: impl FnOnce(Range<usize>, &mut [f32]),
    ) -> Result<(), CommError> {
        let Some(range) = self.under_way.take() else { return Ok(()) };
        let (rank, phase, waited) = (self.rank, PHASE, self.deadline);
        let mut sums = self.sums.recv_timeout(self.deadline).map_err(|error| match error {
            RecvTimeoutError::Disconnected => CommError::Broken { rank, phase },
            RecvTimeoutError::Timeout => CommError::DeadlinePassed { rank, peer: Party::Anyone, phase, waited },
        })??;
        outcome(range.clone(), &mut sums);
        for ((weight, sent), new) in weights[range].iter_mut().zip(&self.sent).zip(&sums) {
            *weight = new + (*weight - sent);
        }
        self.spare = sums;
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Without numbers the thread ends; one that waits for a dead rank has a deadline.
        self.numbers = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
