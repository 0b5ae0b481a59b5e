//! The control connection after the rendezvous: heartbeats in both directions, and what follows when they stop.
//!
//! A [`Control`] is held by the training loop. A thread of its own (`control/desk.rs`) tends the sockets and feeds the pure
//! [`crate::membership`]; its verdict sets the [`Stop`], which ends every wait of this process.

mod desk;
mod returns;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::{Rank, RunId, Stop};
use paceline_system::progress::{Position, Progress};
use paceline_system::threads;

use crate::ClusterError;
use crate::connection::Connection;
use crate::ledger::{Claim, Counted, Given, Take};
use crate::membership::Verdict;
use crate::message::{Admission, Folder};
use crate::rendezvous::{JoinOptions, Place, door::Door};
use crate::table::Table;
use desk::Desk;

/// How long a process that failed waits for the verdict, beyond the time after which rank 0 itself counts as silent: rank 0
/// answers at once if it is alive.
const VERDICT_MAX: Duration = Duration::from_secs(3);

/// What the training loop tells the control thread.
#[derive(Debug)]
enum Command {
    Goodbye,
    Folder(Folder),
    Expect(Duration),
    Spare(Range<usize>, Result<(), String>),
    Ready,
    Admit { rank: Rank, life: u16, admission: Admission },
    Take(Take),
    Claim(Claim),
    Close(u64),
    Fail { why: String, suspect: Option<Rank>, in_vain: bool },
}

#[derive(Debug, Default)]
struct State {
    table: Option<Table>,
    /// Where rank 0 keeps the run, once it has said so.
    folder: Option<Folder>,
    /// What the last heartbeats carried.
    positions: BTreeMap<Rank, Position>,
    /// How long this process has waited for whom.
    waited: BTreeMap<u32, Duration>,
    /// What this process has asked for of the data, until it is taken.
    given: Option<Given>,
    /// Whether the answer that it claimed counts, until that is taken.
    counted: Option<Counted>,
    /// Ranks that are lost, without whom the others go on.
    lost: Vec<Verdict>,
    /// Rank 0: those that have come back, for the so-manieth time, and could take part.
    ready: BTreeMap<Rank, u16>,
    /// Where this process takes part again, once rank 0 has said so.
    admission: Option<Admission>,
    ended: Option<Result<(), Verdict>>,
    /// The end had nothing to do with other ranks: a mismatch found at the rendezvous.
    refused: Option<String>,
    /// What leads to the others after a verdict: on all but rank 0 the connection to it.
    kept: Option<Vec<Connection>>,
}

/// What the control thread and the training loop both see.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `ready` says so or the time is over.
    fn wait(&self, limit: Duration, mut ready: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, |state| !ready(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// This process's place in a run whose members have all arrived.
#[derive(Debug)]
pub struct Control {
    rank: Rank,
    run: RunId,
    table: Table,
    /// How often this rank has come back.
    life: u16,
    progress: Progress,
    stop: Stop,
    /// How long a process that failed waits for the verdict.
    verdict_max: Duration,
    shared: Arc<Shared>,
    commands: SyncSender<Command>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Rank 0: waits for the others at its port.
    pub(crate) fn hub(
        options: JoinOptions,
        listener: TcpListener,
        data: Option<SocketAddr>,
    ) -> Result<Self, ClusterError> {
        let (wake, woken) = pipe()?;
        let door =
            Door::new(listener, options.member.world, options.stop.clone(), options.tls.clone()).map_err(cannot)?;
        let interrupt = options.interrupt.clone();
        // Rank 0's thread ends the wait at the limit of these options; this is only in case the thread is
        // stuck.
        let limit = options.limits.gather + options.limits.silent + VERDICT_MAX;
        let mut control = Self::start(&options, Table::new(Vec::new()), wake, |shared, commands| {
            Desk::hub(&options, door, data, woken, shared, commands)
        })?;
        let clock = paceline_system::clock::Clock::real();
        while clock.now() < limit {
            let slice = Duration::from_millis(50);
            let state = control.shared.wait(slice, |state| state.table.is_some() || state.ended.is_some());
            if let Some(why) = &state.refused {
                return Err(ClusterError::Refused(why.clone()));
            }
            if let Some(Err(verdict)) = &state.ended {
                return Err(ClusterError::Ended(verdict.clone()));
            }
            if let Some(table) = state.table.clone() {
                drop(state);
                control.table = table;
                return Ok(control);
            }
            drop(state);
            if interrupt.requested() {
                let why = "interrupted while waiting for the other ranks";
                control.fail(why, None);
                return Err(ClusterError::Failed(why.into()));
            }
        }
        Err(ClusterError::Failed("the thread that waits for the other ranks is stuck".into()))
    }

    /// Another rank, whose connection to rank 0 is there.
    pub(crate) fn spoke(options: JoinOptions, place: Place) -> Result<Self, ClusterError> {
        let (wake, woken) = pipe()?;
        let Place { connection, table, life } = place;
        let mut control = Self::start(&options, table.clone(), wake, |shared, commands| {
            Desk::spoke(&options, connection, &table, woken, shared, commands)
        })?;
        control.life = life;
        Ok(control)
    }

    fn start(
        options: &JoinOptions,
        table: Table,
        wake: UnixStream,
        desk: impl FnOnce(Arc<Shared>, std::sync::mpsc::Receiver<Command>) -> Desk,
    ) -> Result<Self, ClusterError> {
        let (commands, received) = sync_channel(8);
        let shared = Arc::new(Shared::default());
        let mut desk = desk(shared.clone(), received);
        let progress = desk.progress();
        let thread = threads::spawn("control", move || desk.run()).map_err(cannot)?;
        let (rank, run, stop) = (options.member.rank, options.run, options.stop.clone());
        let verdict_max = options.limits.silent + VERDICT_MAX;
        let (life, thread) = (0, Some(thread));
        Ok(Self { rank, run, table, life, progress, stop, verdict_max, shared, commands, wake, thread })
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Which run this is: what rank 0 has drawn, and all others have learned from it.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// Rank 0: tells all others where the run is kept, once the folder is there.
    pub fn send_folder(&self, folder: Folder) {
        self.send(Command::Folder(folder));
    }

    /// Rank 0: ranks wait for each other as a matter of course, for so long at once, however often: the stages of a pipeline do. Whoever is
    /// waited for longer is late.
    pub fn expect_waits(&self, longest: Duration) {
        self.send(Command::Expect(longest));
    }

    /// Rank 0: from now on the loss of one of these ranks ends nothing; the others go on without it. Whether it may come back,
    /// or why not, in a sentence.
    pub fn spare(&self, ranks: Range<usize>, return_is: Result<(), String>) {
        self.send(Command::Spare(ranks, return_is));
    }

    /// The ranks that were lost, without whom the others go on.
    pub fn lost(&self) -> Vec<Verdict> {
        self.shared.lock().lost.clone()
    }

    /// Takes the next portion of the data, for this process alone; by one thread at a time.
    ///
    /// # Errors
    /// When the run ends, or nothing is said within the limit.
    pub fn take(&self, take: Take, limit: Duration) -> Result<Given, ClusterError> {
        self.shared.lock().given = None;
        if self.commands.send(Command::Take(take)).is_ok() {
            let _ = (&self.wake).write(&[1]);
        }
        let answers = |given: &Given| given.stretch == take.stretch;
        let mut state =
            self.shared.wait(limit, |state| state.given.as_ref().is_some_and(answers) || state.ended.is_some());
        match (state.given.take().filter(answers), &state.ended) {
            (Some(given), _) => Ok(given),
            (None, Some(Err(verdict))) => Err(ClusterError::Ended(verdict.clone())),
            (None, _) => Err(ClusterError::Failed(format!("rank 0 did not say within {limit:?} what comes next"))),
        }
    }

    /// Says that a portion is computed, and hears whether its answer counts; by one thread at a time.
    ///
    /// # Errors
    /// As [`Control::take`].
    pub fn claim(&self, claim: Claim, limit: Duration) -> Result<bool, ClusterError> {
        self.shared.lock().counted = None;
        if self.commands.send(Command::Claim(claim)).is_ok() {
            let _ = (&self.wake).write(&[1]);
        }
        let answers = |counted: &Counted| counted.claim == claim;
        let mut state =
            self.shared.wait(limit, |state| state.counted.as_ref().is_some_and(answers) || state.ended.is_some());
        match (state.counted.take().filter(answers), &state.ended) {
            (Some(counted), _) => Ok(counted.counts),
            (None, Some(Err(verdict))) => Err(ClusterError::Ended(verdict.clone())),
            (None, _) => Err(ClusterError::Failed(format!("rank 0 did not say within {limit:?} what counts"))),
        }
    }

    /// Says that no more steps should begin in a stretch of the data.
    pub fn close(&self, stretch: u64) {
        if self.commands.send(Command::Close(stretch)).is_ok() {
            let _ = (&self.wake).write(&[1]);
        }
    }

    /// The others: where rank 0 keeps the run; waits until it says so.
    ///
    /// # Errors
    /// When the run ends before, or nothing is said within the limit.
    pub fn folder(&self, limit: Duration) -> Result<Folder, ClusterError> {
        let state = self.shared.wait(limit, |state| state.folder.is_some() || state.ended.is_some());
        match (&state.folder, &state.ended) {
            (Some(folder), _) => Ok(folder.clone()),
            (None, Some(Err(verdict))) => Err(ClusterError::Ended(verdict.clone())),
            (None, _) => {
                Err(ClusterError::Failed(format!("rank 0 did not say within {limit:?} where the run is kept")))
            }
        }
    }

    /// All members.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Where the training loop says how far it is; heartbeats carry it.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Where a rank was when its last heartbeat came. Rank 0 receives those of all others, who receive those
    /// of rank 0.
    pub fn position_of(&self, rank: Rank) -> Option<Position> {
        self.shared.lock().positions.get(&rank).copied()
    }

    /// How long this process has waited for whom and done nothing else, as far as its control thread saw.
    pub fn waited(&self) -> BTreeMap<u32, Duration> {
        self.shared.lock().waited.clone()
    }

    /// The flag that is set with the verdict.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Why everybody ends, if that is decided.
    pub fn verdict(&self) -> Option<Verdict> {
        self.shared.lock().ended.clone().and_then(Result::err)
    }

    /// Says that this process cannot go on, and whose fault it may be (who a broken connection led to), and waits for the
    /// verdict that everybody gets. None if there is none within a few seconds.
    pub fn fail(&self, why: &str, suspect: Option<Rank>) -> Option<Verdict> {
        self.give_up(why, suspect, false)
    }

    /// As [`Control::fail`]; `in_vain` says whether the same would happen again if everything were started again.
    pub fn give_up(&self, why: &str, suspect: Option<Rank>, in_vain: bool) -> Option<Verdict> {
        self.send(Command::Fail { why: why.to_owned(), suspect, in_vain });
        let state = self.shared.wait(self.verdict_max, |state| state.ended.is_some());
        state.ended.clone().and_then(Result::err)
    }

    /// After a verdict: waits until rank 0 has ended, where it has called [`Control::stay_open`]. Some launchers kill all processes as soon as
    /// one has ended, and rank 0 may still have to save what there is and to say what happened. If rank 0 is gone itself, rank 1 does that,
    /// to which no connection leads: then it waits for a moment.
    pub fn outlast_rank_0(&self, limit: Duration) {
        const MOMENT: Duration = Duration::from_secs(2);
        let kept = self.shared.wait(MOMENT, |state| state.kept.is_some()).kept.take().unwrap_or_default();
        let clock = paceline_system::clock::Clock::real();
        match kept.into_iter().next() {
            Some(mut hub) => {
                while clock.now() < limit && !hub.drained() {
                    paceline_system::clock::sleep(Duration::from_millis(5));
                }
            }
            None => paceline_system::clock::sleep(MOMENT),
        }
    }

    /// Rank 0, after a verdict: its connections close when the process ends, and not before.
    pub fn stay_open(&self) {
        std::mem::forget(self.shared.wait(Duration::from_secs(1), |state| state.kept.is_some()).kept.take());
    }

    /// Says that this process is through, and waits until all are: until then its heartbeats go on.
    ///
    /// # Errors
    /// When another rank fails meanwhile, or they are not through within the limit.
    pub fn finish(mut self, limit: Duration) -> Result<(), ClusterError> {
        self.send(Command::Goodbye);
        let ended = self.shared.wait(limit, |state| state.ended.is_some()).ended.clone();
        match ended {
            Some(Ok(())) => {
                self.end();
                Ok(())
            }
            Some(Err(verdict)) => Err(ClusterError::Ended(verdict)),
            None => Err(ClusterError::Failed(format!("the other ranks were not through within {limit:?}"))),
        }
    }

    fn send(&self, command: Command) {
        // The thread may have ended, or have enough to do with what it was told: then this is news to nobody.
        let _ = self.commands.try_send(command);
        let _ = (&self.wake).write(&[1]);
    }

    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Control {
    /// A process that drops its place without [`Control::finish`] has failed, and says so.
    fn drop(&mut self) {
        if self.thread.is_some() {
            // Where ranks are threads, the process goes on and can say which of them it was.
            let why = if std::thread::panicking() { "it panicked" } else { "it ended before the run did" };
            self.send(Command::Fail { why: why.into(), suspect: None, in_vain: false });
            self.end();
        }
    }
}

fn pipe() -> Result<(UnixStream, UnixStream), ClusterError> {
    let (wake, woken) = UnixStream::pair().map_err(cannot)?;
    wake.set_nonblocking(true).map_err(cannot)?;
    woken.set_nonblocking(true).map_err(cannot)?;
    Ok((wake, woken))
}

fn cannot(error: std::io::Error) -> ClusterError {
    ClusterError::Failed(format!("the operating system refused what the control connection needs: {error}"))
}
