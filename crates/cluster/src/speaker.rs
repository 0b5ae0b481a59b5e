//! Who tells the user of a failure, so that it is told once.
//!
//! Rank 0 knows what was saved and how to go on, so it speaks, whoever is at fault; if rank 0 itself is gone, rank 1 does.
//! The others end without a word where all write to the same terminal or file, because one launcher started them; those
//! that were started by hand, each in a terminal of its own, all say it.

use paceline_comm::Rank;

use crate::launch::child::PARENT;
use crate::membership::{Cause, Verdict};
use crate::spec::Variables;
use crate::token;

/// The rank that tells of a failure that everybody has been told of.
pub fn speaker(verdict: &Verdict) -> Rank {
    let speaks_itself = matches!(verdict.cause, Cause::Failed { .. });
    Rank::at(usize::from(verdict.rank == 0 && !speaks_itself))
}

/// Whether this process writes to where the others of its run write to: a launcher has started them all.
pub fn shares_output(variables: &Variables) -> bool {
    let by_ssh = variables.get(token::VARIABLE).is_some_and(|value| value == "stdin");
    by_ssh || says(variables, PARENT) || ends_with_the_first(variables)
}

/// Whether another launcher has started all processes, which may kill the rest as soon as one of them has failed.
pub fn ends_with_the_first(variables: &Variables) -> bool {
    const LAUNCHERS: [&str; 5] =
        ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"];
    LAUNCHERS.iter().any(|name| says(variables, name))
}

fn says(variables: &Variables, name: &str) -> bool {
    variables.get(name).is_some_and(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use paceline_system::progress::Position;

    use super::*;

    #[test]
    fn rank_0_speaks_unless_it_is_gone() {
        let verdict = |rank, cause| Verdict { rank, host: "h".into(), position: Position::default(), cause };
        let gone = Cause::Disconnected { why: "closed".into() };
        let failed = Cause::Failed { why: "no room on the disk".into(), in_vain: false };
        assert_eq!(speaker(&verdict(2, gone.clone())), Rank(0));
        assert_eq!(speaker(&verdict(0, gone)), Rank(1));
        assert_eq!(speaker(&verdict(0, Cause::Silent { silent_ms: 15_000 })), Rank(1));
        assert_eq!(speaker(&verdict(0, failed.clone())), Rank(0), "it can still speak");
        assert_eq!(speaker(&verdict(1, failed)), Rank(0));
    }

    #[test]
    fn those_that_were_started_by_hand_have_terminals_of_their_own() {
        let of = |pairs: &[(&str, &str)]| -> Variables {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        assert!(!shares_output(&of(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("PACELINE_TOKEN", "00ff")])));
        assert!(shares_output(&of(&[("RANK", "1"), (PARENT, "77")])));
        assert!(shares_output(&of(&[("RANK", "1"), ("PACELINE_TOKEN", "stdin")])));
        assert!(ends_with_the_first(&of(&[("PMI_RANK", "1")])) && !ends_with_the_first(&of(&[(PARENT, "77")])));
        assert!(shares_output(&of(&[("OMPI_COMM_WORLD_RANK", "1")])) && shares_output(&of(&[("PMI_RANK", "1")])));
    }
}
