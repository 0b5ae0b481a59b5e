//! Workers that are one to the others (`center/grouped.rs`).

use paceline_comm::Communicator;

/// A worker's place in a group.
#[derive(Debug)]
pub enum Group {
    /// It speaks for its group, with the servers and the first ones of the others, who are the workers of
    /// [`super::Join::roles`].
    First {
        /// To the workers of the group.
        inside: Box<Communicator>,
    },
    /// [`super::Join::communicator`] is to the workers of the group.
    Other,
}
