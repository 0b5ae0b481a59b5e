//! Processes that live and end together. Each is started from a thread of its own, which stays: the kernel ends the
//! process when that thread's process ends, and the thread's cores are the process's.

use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use paceline_comm::Token;
use paceline_system::clock::Clock;
use paceline_system::process::{self, Tell};
use paceline_system::{signal, threads};

use super::output::{Output, prefix};
use crate::ClusterError;
use crate::token;

/// After the first failure, the others end by themselves: their own membership names who failed, and one of them may
/// save gigabytes on a slow disk.
pub const GRACE: Duration = Duration::from_secs(120);

/// After being told to end, before being killed.
const TERMINATE: Duration = Duration::from_secs(3);

/// What a process answers whose failure would come again if it were started again; for launchers that do.
pub const IN_VAIN: u8 = 3;

/// Variables of a place in a run, by which launchers around this one would contradict what the started processes are told.
const FOREIGN: [&str; 13] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    token::VARIABLE,
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
];

/// One process to start.
#[derive(Clone, Debug)]
pub struct Start {
    /// Its rank.
    pub rank: usize,
    /// Where it runs, for messages.
    pub host: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// What its environment says besides this process's.
    pub variables: Vec<(String, String)>,
    /// What is written to its standard input, which then stays open.
    pub token: Token,
    /// The cores it stays on; empty for all.
    pub cores: Vec<usize>,
    /// Whether it writes to this process's own output, and so may draw on a terminal; otherwise each line is marked with its rank.
    pub inherits: bool,
    /// Whether the others can do without it: then they go on when it fails, and the run has not failed.
    pub spare: bool,
    /// Whether Ctrl-C reaches it as a signal; otherwise as a line on its standard input.
    pub signals: bool,
}

/// How a group ended, if not badly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All are done.
    Done,
    /// One failed, and has said why, or another has said it for it.
    Failed {
        /// Whether it was the input that cannot work.
        refused: bool,
        /// Whether it would fail again if it were started again.
        in_vain: bool,
    },
    /// The user asked for the end, and all have ended.
    Interrupted {
        /// Whether all did so as processes do that have saved.
        in_order: bool,
    },
}

enum News {
    Started { index: usize, pid: u32, stdin: ChildStdin },
    Ended { index: usize, status: Result<ExitStatus, String> },
}

/// What is known of a process.
#[derive(Default)]
struct Watched {
    running: Option<(u32, ChildStdin)>,
    status: Option<Result<ExitStatus, String>>,
    /// It had to be ended by the launcher.
    told: bool,
    /// It stood still when another had failed: somebody had stopped it.
    stopped: bool,
}

/// Starts all, passes their output on, and waits until all have ended. Ctrl-C is passed on once. When one fails, the others
/// have two minutes to end by themselves, in which one of them may save; one that is stopped cannot, and is ended at once.
///
/// # Errors
/// When one fails and none was left that could say so; the sentence names it.
pub fn run(starts: &[Start], stop: &signal::Stop, out: &Output, err: &Output) -> Result<Ended, ClusterError> {
    run_beside(starts, (stop, &signal::Stop::new()), out, err)
}

/// As [`run`], of processes that have nothing to save: those that have not ended so long after they were told to are killed.
///
/// # Errors
/// As [`run`].
pub fn run_obeying(
    starts: &[Start],
    (stop, patience): (&signal::Stop, Duration),
    out: &Output,
    err: &Output,
) -> Result<Ended, ClusterError> {
    start_and_supervise(starts, (stop, &signal::Stop::new(), Some(patience)), out, err)
}

/// As [`run`], beside a rank that is no process of the group: `failed` says that it has failed.
///
/// # Errors
/// As [`run`].
pub fn run_beside(
    starts: &[Start],
    (stop, failed): (&signal::Stop, &signal::Stop),
    out: &Output,
    err: &Output,
) -> Result<Ended, ClusterError> {
    start_and_supervise(starts, (stop, failed, None), out, err)
}

/// What asks a group to end, what says that it has failed, and how long it may take to end after it was asked, if that has a limit.
type Wishes<'a> = (&'a signal::Stop, &'a signal::Stop, Option<Duration>);

fn start_and_supervise(
    starts: &[Start],
    wishes: Wishes<'_>,
    out: &Output,
    err: &Output,
) -> Result<Ended, ClusterError> {
    let (sender, news) = sync_channel(2 * starts.len() + 2);
    let mut watched: Vec<Watched> = starts.iter().map(|_| Watched::default()).collect();
    for (index, start) in starts.iter().enumerate() {
        let (start, sender) = (start.clone(), sender.clone());
        let (prefix, out, err) = (prefix(start.rank, starts.len()), out.clone(), err.clone());
        let spawned = threads::spawn("launch", move || tend(index, &start, &prefix, out, err, &sender));
        if let Err(error) = spawned {
            watched[index].status = Some(Err(format!("no thread is left: {error}")));
        }
    }
    drop(sender);
    supervise(starts, &mut watched, wishes, &news)
}

/// The thread of one process.
fn tend(index: usize, start: &Start, prefix: &str, out: Output, err: Output, news: &SyncSender<News>) {
    let status = begin(start).and_then(|mut child| {
        let pid = child.id();
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), stdout, stderr) = pipes else { return Err("it has no pipes".into()) };
        // The process may have ended already; its status says more than a broken pipe.
        let _ = stdin.write_all(format!("{}\n", start.token.to_hex()).as_bytes());
        let _ = news.send(News::Started { index, pid, stdin });
        let stdout = stdout.map(|stdout| (out, Box::new(stdout) as Box<dyn std::io::Read + Send>));
        let stderr = stderr.map(|stderr| (err, Box::new(stderr) as Box<dyn std::io::Read + Send>));
        let readers: Vec<_> = [stdout, stderr]
            .into_iter()
            .flatten()
            .filter_map(|(target, source)| {
                let prefix = prefix.to_owned();
                threads::spawn("output", move || target.copy(&prefix, source)).ok()
            })
            .collect();
        let status = child.wait().map_err(|error| error.to_string());
        // Its last words come before its end is told; something it left behind may hold the pipes open, so not for ever.
        let clock = Clock::real();
        while readers.iter().any(|reader| !reader.is_finished()) && clock.now() < Duration::from_secs(1) {
            paceline_system::clock::sleep(Duration::from_millis(2));
        }
        status
    });
    let _ = news.send(News::Ended { index, status });
}

fn begin(start: &Start) -> Result<Child, String> {
    if !start.cores.is_empty() {
        process::stay_on(&start.cores).map_err(|error| format!("it cannot have cores {:?}: {error}", start.cores))?;
    }
    let mut command = Command::new(&start.program);
    let output = || if start.inherits { Stdio::inherit() } else { Stdio::piped() };
    command.args(&start.arguments).stdin(Stdio::piped()).stdout(output()).stderr(output()).process_group(0);
    FOREIGN.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.envs(start.variables.iter().map(|(name, value)| (name, value)));
    command.spawn().map_err(|error| format!("cannot start {}: {error}", start.program.display()))
}

fn supervise(
    starts: &[Start],
    watched: &mut [Watched],
    (stop, failed, patience): Wishes<'_>,
    news: &Receiver<News>,
) -> Result<Ended, ClusterError> {
    let clock = Clock::real();
    let (mut asked_at, mut failed_at, mut first) = (None, None, None);
    while watched.iter().any(|process| process.status.is_none()) {
        match news.recv_timeout(Duration::from_millis(50)) {
            Ok(News::Started { index, pid, stdin }) => {
                watched[index].running = Some((pid, stdin));
                if asked_at.is_some() {
                    pass_on(&starts[index], &mut watched[index], stop.signal());
                }
            }
            Ok(News::Ended { index, status }) => {
                if !starts[index].spare && !status.as_ref().is_ok_and(ExitStatus::success) {
                    failed_at.get_or_insert(clock.now());
                    first.get_or_insert(index);
                }
                watched[index].status = Some(status);
                watched[index].running = None;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if stop.requested() && asked_at.is_none() {
            asked_at = Some(clock.now());
            starts.iter().zip(&mut *watched).for_each(|(start, process)| pass_on(start, process, stop.signal()));
        }
        if asked_at.zip(patience).is_some_and(|(since, patience)| clock.now() - since > patience) {
            watched.iter().flat_map(|process| &process.running).for_each(|(pid, _)| process::tell(*pid, Tell::Kill));
        }
        if failed.requested() {
            failed_at.get_or_insert(clock.now());
        }
        // Whoever is still there when the others are through was lost by them.
        if starts.iter().zip(&*watched).all(|(start, process)| start.spare || process.status.is_some()) {
            failed_at.get_or_insert(clock.now());
        }
        if let Some(since) = failed_at {
            end_the_rest(watched, clock.now() - since);
        }
    }
    conclude(starts, watched, first, asked_at.is_some())
}

fn pass_on(start: &Start, process: &mut Watched, signal: signal::Signal) {
    let what = match signal {
        signal::Signal::Interrupt => Tell::Interrupt,
        signal::Signal::Terminate => Tell::Terminate,
        signal::Signal::HangUp => Tell::HangUp,
    };
    match &mut process.running {
        Some((pid, _)) if start.signals => process::tell(*pid, what),
        Some((_, stdin)) => {
            let _ = stdin.write_all(b"stop\n").and_then(|()| stdin.flush());
        }
        None => {}
    }
}

fn end_the_rest(watched: &mut [Watched], since: Duration) {
    for process in watched {
        if let Some((pid, _)) = &process.running {
            process.stopped |= process::is_stopped(*pid);
            if process.stopped || since >= GRACE + TERMINATE {
                process::tell(*pid, Tell::Kill);
            } else if since >= GRACE && !std::mem::replace(&mut process.told, true) {
                process::tell(*pid, Tell::Terminate);
            }
        }
    }
}

/// Whether a process that was told to end was done, or says that a signal ended it, or was ended by it.
fn ended_in_order(process: &Watched) -> bool {
    let Some(Ok(status)) = &process.status else { return false };
    match (status.code(), status.signal()) {
        (Some(code), _) => code == 0 || signal::Signal::is_exit_code(code),
        (None, number) => number.is_some_and(|number| signal::Signal::is_exit_code(128 + number)),
    }
}

fn conclude(
    starts: &[Start],
    watched: &[Watched],
    first: Option<usize>,
    interrupted: bool,
) -> Result<Ended, ClusterError> {
    if interrupted {
        return Ok(Ended::Interrupted { in_order: watched.iter().all(ended_in_order) });
    }
    let Some(first) = first else { return Ok(Ended::Done) };
    // Of several, one that was stopped or killed is likelier to be the cause than those that ended because of it.
    let killed =
        |process: &Watched| !process.told && matches!(&process.status, Some(Ok(status)) if status.signal().is_some());
    let stopped = watched.iter().position(|process| process.stopped);
    let index = stopped.or_else(|| watched.iter().position(killed)).unwrap_or(first);
    // Whoever ends with an exit code of its own has spoken, or knows who has.
    let spoke = |process: &Watched| {
        !process.told && matches!(&process.status, Some(Ok(status)) if status.code().is_some_and(|code| code > 0))
    };
    if watched.iter().any(spoke) {
        let code = |process: &Watched| process.status.as_ref().and_then(|status| status.as_ref().ok()?.code());
        let refused = watched.iter().any(|process| code(process) == Some(2));
        let in_vain = refused || watched.iter().any(|process| code(process) == Some(IN_VAIN.into()));
        return Ok(Ended::Failed { refused, in_vain });
    }
    let (rank, host) = (starts[index].rank, &starts[index].host);
    let how = match &watched[index].status {
        _ if watched[index].stopped => "was stopped (SIGSTOP) and had to be ended".to_owned(),
        Some(Ok(status)) => format!("was killed by signal {}", status.signal().unwrap_or_default()),
        Some(Err(error)) => format!("did not run: {error}"),
        None => "was lost".into(),
    };
    let told: Vec<String> = (0..starts.len())
        .filter(|&other| watched[other].told)
        .map(|other| format!("rank {}", starts[other].rank))
        .collect();
    let rest =
        if told.is_empty() { String::new() } else { format!("; {} did not end and had to be ended", told.join(", ")) };
    Err(ClusterError::Failed(format!("rank {rank} on {host} {how}{rest}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(rank: usize, script: &str) -> Start {
        Start {
            rank,
            host: "this machine".into(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            variables: Vec::new(),
            token: Token::random(),
            cores: Vec::new(),
            inherits: false,
            spare: false,
            signals: true,
        }
    }

    #[test]
    fn a_process_that_does_not_obey_is_killed_after_a_while() {
        let (stop, clock) = (signal::Stop::new(), Clock::real());
        let asks = stop.clone();
        threads::spawn("asks", move || {
            paceline_system::clock::sleep(Duration::from_millis(500));
            asks.request();
        })
        .unwrap();
        let deaf = "trap '' INT; while :; do sleep 0.1; done";
        let starts = [shell(0, deaf), shell(1, "exec sleep 60")];
        let output = Output::to(std::io::sink());
        let ended = run_obeying(&starts, (&stop, Duration::from_millis(500)), &output, &output).unwrap();
        assert_eq!(ended, Ended::Interrupted { in_order: false });
        assert!(clock.now() < Duration::from_secs(20), "{:?}", clock.now());
    }

    #[test]
    fn a_process_that_the_others_can_do_without_may_fail_or_stand_still() {
        let clock = Clock::real();
        let spare = |rank, script| Start { spare: true, ..shell(rank, script) };
        let starts = [shell(0, "sleep 0.5"), spare(1, "exit 1"), spare(2, "kill -9 $$"), spare(3, "kill -STOP $$")];
        let output = Output::to(std::io::sink());
        assert_eq!(run(&starts, &signal::Stop::new(), &output, &output).unwrap(), Ended::Done);
        assert!(clock.now() < Duration::from_secs(20), "{:?}", clock.now());
        let starts = [shell(0, "exit 1"), spare(1, "exit 0")];
        let ended = run(&starts, &signal::Stop::new(), &output, &output).unwrap();
        assert_eq!(ended, Ended::Failed { refused: false, in_vain: false });
    }

    #[test]
    fn a_process_that_starts_after_the_wish_is_told_too() {
        let (stop, clock) = (signal::Stop::new(), Clock::real());
        stop.request();
        // Not by a shell: one that is about to become another program may catch the signal and forget it.
        let sleep = |rank| Start { program: "sleep".into(), arguments: vec!["60".into()], ..shell(rank, "") };
        let starts: Vec<Start> = (0..4).map(sleep).collect();
        let output = Output::to(std::io::sink());
        assert_eq!(run(&starts, &stop, &output, &output).unwrap(), Ended::Interrupted { in_order: true });
        assert!(clock.now() < Duration::from_secs(20), "{:?}", clock.now());
    }
}
