//! Writes checkpoints beside training: what is to be saved is copied between two steps, and a thread writes the copy while steps go on.
//!
//! One at a time, so that there is one copy: the next save is not due before the last is on the disk. The copy is as large as the weights
//! and the optimizer together, and is taken when first needed. What goes wrong is told when somebody asks, at the next step.

use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;

use paceline_system::clock::Clock;
use paceline_system::disk::DiskError;
use paceline_system::threads;

use crate::checkpoint::{Checkpoints, Label, Position, Snapshot};
use crate::replica::Replica;

/// What became of a checkpoint.
pub(super) struct Written {
    pub position: Position,
    pub best: bool,
    pub folder: Result<PathBuf, DiskError>,
    /// What writing took.
    pub seconds: f64,
}

/// Has at most one checkpoint under way.
#[derive(Default)]
pub(super) struct Saver {
    idle: Option<Box<Snapshot>>,
    under_way: Option<JoinHandle<(Box<Snapshot>, Written)>>,
}

impl Saver {
    /// Whether a checkpoint is under way, or was and nobody has asked for it.
    pub fn is_busy(&self) -> bool {
        self.under_way.is_some()
    }

    /// Copies a replica and begins to write the copy.
    ///
    /// # Errors
    /// When the system gives no memory or no thread; nothing was written.
    ///
    /// # Panics
    /// When another is under way.
    pub fn begin(
        &mut self,
        checkpoints: &Checkpoints,
        replica: &Replica,
        label: Label,
        clock: &Clock,
    ) -> io::Result<()> {
        assert!(!self.is_busy(), "one checkpoint at a time");
        let snapshot = match self.idle.take() {
            Some(mut snapshot) => {
                snapshot.fill(replica);
                snapshot
            }
            None => Box::new(Snapshot::new(replica).map_err(io::Error::other)?),
        };
        let (checkpoints, clock) = (checkpoints.clone(), clock.clone());
        let body = move || {
            let start = clock.seconds();
            let folder = checkpoints.save(&snapshot.contents(), &label);
            let seconds = clock.seconds() - start;
            (snapshot, Written { position: label.position, best: label.best, folder, seconds })
        };
        self.under_way = Some(threads::spawn("paceline-saver", body)?);
        Ok(())
    }

    /// The checkpoint that was under way, if it is written by now, or once it is if `wait`.
    ///
    /// # Panics
    /// When the thread did.
    pub fn take(&mut self, wait: bool) -> Option<Written> {
        let thread = self.under_way.take_if(|thread| wait || thread.is_finished())?;
        // Memory that was refused there is refused here.
        let (snapshot, written) = thread.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload));
        self.idle = Some(snapshot);
        Some(written)
    }
}
