//! Ranks without whom the others go on, and those of them that come back: rank 0 lets them in again, and tells the others.

use paceline_comm::Rank;
use paceline_system::event::Event as Logged;
use paceline_system::progress::Position;

use super::{Desk, difference};
use crate::connection::Connection;
use crate::membership::{Event, Verdict};
use crate::message::{Admission, Message};
use crate::table::Entry;

impl Desk {
    /// A rank is lost, and the others go on: whatever waits for it in this process ends.
    pub(super) fn go_on(&mut self, verdict: Verdict) {
        let lost = Rank::at(verdict.rank);
        // One that had come back and did not take part yet is lost as it was.
        let had_returned = self.stop.returning(lost).is_some();
        self.stop.lose(lost);
        if self.me.index() == 0 {
            self.connections[verdict.rank] = None;
            self.send_all(&Message::Lost { verdict: verdict.clone() }, |_, _| true);
            let (portions, told) = self.groups.lose(&mut self.ledger, verdict.rank);
            self.tell(told);
            let Position { step, phase, .. } = verdict.position;
            let why = verdict.to_string();
            let (lost_rank, host) = (lost.0, verdict.host.clone());
            if had_returned {
                self.log.warn(format!("{verdict}; it had come back and did not take part yet"));
            } else {
                let event = Logged::Lost { lost_rank, host, phase, step, portions, why };
                self.log.tell(format!("{verdict}; the others go on without it"), event);
            }
        }
        self.shared.change(|state| {
            state.ready.remove(&lost);
            state.lost.push(verdict);
        });
    }

    /// Somebody greets with a rank of a run that has begun: let in if that rank was lost and may come back.
    pub(super) fn take_back(&mut self, rank: Rank, mut connection: Connection, mut entry: Entry, config: &str) {
        let may = self.membership.may_return(rank).and_then(|()| self.return_is.clone());
        let same = difference(&self.config, config, rank, &entry.host).map_or(Ok(()), Err);
        if let Err(why) = may.and(same) {
            let _ = connection.push(&Message::Refused { why: why.clone() }, self.clock.now());
            return self.refuse(&why);
        }
        if let Ok(address) = connection.stream().peer_addr() {
            entry.seen_from(address.ip());
        }
        let host = entry.host.clone();
        self.connections[rank.index()] = Some(connection);
        self.entries[rank.index()] = Some(entry);
        self.feed(Event::Returned { rank, host });
    }

    /// Rank 0 tells a rank that has come back what the others know, and the others that it has.
    pub(super) fn let_return(&mut self, rank: Rank, life: u16) {
        if self.me.index() > 0 {
            return;
        }
        self.stop.let_return(rank, life);
        self.ledger.readmit(rank.index());
        let entries: Vec<Entry> = self.entries.iter().flatten().cloned().collect();
        let host = entries[rank.index()].host.clone();
        self.send_all(&Message::Table { entries, run: self.run.to_string(), life }, |_, peer| peer == rank);
        if let Some(folder) = self.folder.clone() {
            self.send_all(&Message::Folder(folder), |_, peer| peer == rank);
        }
        self.send_all(&Message::Returned { rank: rank.0, host, life }, |_, peer| peer != rank);
    }

    /// A rank that has come back could take part.
    pub(super) fn hear_ready(&mut self, rank: Rank) {
        match self.stop.returning(rank) {
            Some(life) => self.shared.change(|state| {
                state.ready.insert(rank, life);
            }),
            None => self.lose(rank, "it says that it is back and was not away".into()),
        }
    }

    /// Rank 0: a rank that has come back takes part from here on, unless it is lost again by now.
    pub(super) fn admit(&mut self, (rank, life): (Rank, u16), admission: Admission) {
        if !self.stop.readmit(rank, life) {
            return;
        }
        self.feed(Event::Readmitted { rank });
        let host = self.entries[rank.index()].as_ref().map(|entry| entry.host.clone()).unwrap_or_default();
        let step = admission.step;
        let sentence = format!("{rank} on {host} takes part again, from step {step} on");
        self.log.tell(sentence, Logged::Returned { returned_rank: rank.0, host, step });
        self.send_all(&Message::Admitted(admission), |_, peer| peer == rank);
    }
}
