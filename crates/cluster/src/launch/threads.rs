//! `--carry thread`: the ranks of a run as threads of this process, each on cores of its own, meeting on loopback as processes do.

use paceline_comm::Rank;
use paceline_system::process;

use super::local::{free_port, share};
use crate::ClusterError;
use crate::error::refused;
use crate::spec::{Address, Local, Member, Source, WORLD_MAX};

/// A rank that is going to be a thread.
#[derive(Clone, Debug)]
pub struct Seat {
    /// Which member it is.
    pub member: Member,
    /// The cores that it stays on; all that there are, if this is empty.
    pub cores: Vec<usize>,
}

/// The ranks of a run of which the last `servers` hold parameters, with a port of their own; `pin` says whether each has cores of its own.
///
/// # Errors
/// When there are to be none or too many, or no port is free.
pub fn seats(world: usize, servers: usize, pin: bool) -> Result<Vec<Seat>, ClusterError> {
    if world <= servers || world > WORLD_MAX {
        return refused(format!(
            "{world} ranks with {servers} servers cannot be; type --replicas with a number from 1"
        ));
    }
    let rendezvous = Address { host: "127.0.0.1".into(), port: free_port()? };
    let shares = if pin { share(&process::cores(), world) } else { vec![Vec::new(); world] };
    let seat = |(rank, cores)| Seat {
        member: Member {
            rank: Rank::at(rank),
            world,
            servers,
            local: Some(Local { rank, world }),
            hosts: Vec::new(),
            rendezvous: rendezvous.clone(),
            data: None,
            source: Source::Threads,
        },
        cores,
    };
    Ok(shares.into_iter().enumerate().map(seat).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Job;

    #[test]
    fn every_rank_has_its_seat_and_the_last_are_servers() {
        let seats = seats(3, 1, true).unwrap();
        assert_eq!(seats.iter().map(|seat| seat.member.rank.index()).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(
            seats.iter().map(|seat| seat.member.job()).collect::<Vec<_>>(),
            [Job::Worker, Job::Worker, Job::Server]
        );
        assert!(seats.iter().all(|seat| seat.member.rendezvous == seats[0].member.rendezvous));
        assert!(!seats[0].member.spans_machines());
        assert!(super::seats(2, 2, true).is_err() && super::seats(0, 0, false).is_err());
    }
}
