//! Starting the ranks of a run: as threads (`threads`), or as processes here (`local`), on other hosts (`ssh`), and through the launchers that clusters
//! have (`mpirun`, `slurm`, `kubernetes`). All of them end in processes that find out by [`crate::spec`] which member
//! they are. The token never stands in an argument, which every user of a machine can list.

pub mod child;
pub mod group;
pub mod kubernetes;
pub mod local;
pub mod mpirun;
mod output;
pub mod slurm;
pub mod ssh;
pub mod threads;

pub use group::{Ended, Start};
pub use output::Output;
pub use paceline_system::shell::quote;

/// Words as one line of a shell.
pub fn line(words: &[String]) -> String {
    words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}
