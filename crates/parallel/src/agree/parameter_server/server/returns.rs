//! A worker that was lost and has come back: the first worker says so, and it asks for what it has missed.

use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Rank};

use super::super::super::returned::{Returned, met_to_words};
use super::super::header::MEETS;
use super::super::talk::all_of_server;
use super::super::turns::Event;
use super::{Doing, Run};

impl Run<'_> {
    /// The first worker says that one which was lost takes part again.
    pub(super) fn readmit(&mut self, worker: usize) -> Result<(), CommError> {
        let number = self.headers[worker].length as u64;
        let returned = Returned::from_number(number, self.roles.workers).filter(|_| worker == 0);
        let Some(returned) = returned else { return Err(self.violation("a worker is back that never was")) };
        let tag = self.next_tag(&[worker]);
        let list = one(worker, Action::Receive, self.states.len());
        self.communicator.exchange(&list, tag, &mut self.states)?;
        if returned.connect(&mut self.communicator) {
            (self.doing[returned.worker], self.tags[returned.worker]) = (Doing::Idle, 0);
            self.turns = self.turns.clone().after(Event::Returned(returned.worker));
        }
        Ok(())
    }

    /// Gives a worker that has come back the weights as they are, how often all have met, and running statistics.
    pub(super) fn give_present(&mut self, worker: usize) -> Result<(), CommError> {
        let list = all_of_server(self.roles, &self.shape.buckets, self.server, worker..worker + 1);
        let tag = self.next_tag(&[worker]);
        self.communicator.exchange(&list, tag, &mut self.weights)?;
        let mut numbers = [&met_to_words(self.meets - MEETS)[..], &self.states].concat();
        let tag = self.next_tag(&[worker]);
        self.communicator.exchange(&one(worker, Action::Send, numbers.len()), tag, &mut numbers)?;
        (0..self.shape.buckets.len()).for_each(|bucket| self.versions.read(worker, bucket));
        Ok(())
    }
}

/// One message with a worker; none of nothing.
fn one(worker: usize, action: Action, length: usize) -> Vec<Transfer> {
    let transfer = Transfer { step: worker as u32, action, peer: Rank::at(worker), start: 0, length };
    (length > 0).then_some(transfer).into_iter().collect()
}
