//! The other ranks of a run that a program starts itself: this program again, once for each, tied to this process.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::cluster::launch::Output;
use crate::cluster::launch::group::{self, Ended, Start};
use crate::cluster::launch::local::Local;
use crate::cluster::spec::Variables;
use crate::cluster::{ClusterError, Member};
use crate::system::signal::Stop;
use crate::system::{host, process, threads};
use crate::train::Config;

use super::execute::Part;
use super::team;
use crate::failure::Failure;

/// All ranks of a run on this machine; the first is this process.
pub fn starts(config: &Config, arguments: Option<&[String]>) -> Result<Vec<Start>, Failure> {
    let own = || std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let arguments = arguments.map_or_else(own, <[String]>::to_vec);
    let program: PathBuf = host::own_program().map_err(Failure::failed)?;
    let workers = config.ranks();
    let servers = config.server_count();
    Ok(Local { workers, servers, program, arguments, pin: config.pin }.starts()?)
}

/// Which member this process is, by the variables that it would have been started with.
pub fn first_member(first: &Start, config: &Config) -> Result<Member, Failure> {
    let variables: Variables = first.variables.iter().cloned().collect();
    let member = team::from_launcher(config, &variables)?;
    Ok(member.expect("a start has the variables of a member"))
}

/// The other processes, and the thread that watches over them.
pub struct Others {
    watch: JoinHandle<Result<Ended, ClusterError>>,
    /// Asks them to end.
    stop: Stop,
    /// Set when they have ended although nobody has met them.
    absent: Stop,
    met: Arc<AtomicBool>,
    /// Set when this process has failed: what does not end by itself is ended.
    failed: Stop,
}

impl Others {
    /// Starts them. A stop of this process is passed on to them.
    pub fn start(starts: Vec<Start>, stop: &Stop) -> Result<Self, Failure> {
        let (stop, absent, met) = (stop.child(), stop.child(), Arc::new(AtomicBool::new(false)));
        let (asked, gone, have_met, failed) = (stop.clone(), absent.clone(), Arc::clone(&met), Stop::new());
        let has_failed = failed.clone();
        let watch = threads::spawn("other ranks", move || {
            let (out, err) = (Output::to(std::io::stdout()), Output::to(std::io::stderr()));
            let ended = group::run_beside(&starts, (&asked, &has_failed), &out, &err);
            // Once they have met, ranks hear of each other's ends by themselves, and know better why.
            if !have_met.load(Ordering::SeqCst) {
                gone.request();
            }
            ended
        });
        Ok(Self { watch: watch.map_err(Failure::failed)?, stop, absent, met, failed })
    }

    /// What ends the wait for them.
    pub fn absent(&self) -> Stop {
        self.absent.clone()
    }

    /// Says that all have come.
    pub fn met(&self) {
        self.met.store(true, Ordering::SeqCst);
    }

    /// Waits for their end, which is asked for where this process has failed before they came.
    pub fn end(self, ended: Result<Part, Failure>) -> Result<Part, Failure> {
        let met = self.met.load(Ordering::SeqCst);
        // Nobody else can have asked for it: the user's wish counts for both.
        let came_to_nothing = !met && self.absent.requested() && !self.stop.requested();
        if ended.is_err() {
            self.failed.request();
        }
        if ended.is_err() && !met {
            self.stop.request();
        }
        let others =
            self.watch.join().map_err(|_| Failure::failed("the thread that watches other ranks has failed"))?;
        match ended {
            Err(_) if came_to_nothing => Err(match others {
                Ok(Ended::Failed { refused, in_vain }) => Failure::said(refused, in_vain),
                Ok(_) => unreached(),
                Err(error) => error.into(),
            }),
            Err(failure) => Err(failure),
            Ok(part) => match others? {
                Ended::Failed { refused, in_vain } => Err(Failure::said(refused, in_vain)),
                _ => Ok(part),
            },
        }
    }
}

fn unreached() -> Failure {
    Failure::failed(
        "the other ranks have ended without joining: the program that they run did not reach this run; give Run::arguments that lead to it",
    )
}

/// Keeps this thread and those that it starts on some cores, until it is dropped.
pub struct Pinned(Option<Vec<usize>>);

impl Pinned {
    /// To these; to no others if there are none, or the kernel does not want to.
    pub fn to(cores: &[usize]) -> Self {
        let before = process::cores();
        Self((!cores.is_empty() && process::stay_on(cores).is_ok()).then_some(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // What could be used before can be used again; if not, the program goes on with what it has.
            let _ = process::stay_on(before);
        }
    }
}
