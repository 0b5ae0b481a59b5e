//! What a process is among others, from flags, a file, or the variables of a launcher; and the processes that it starts itself.

use std::path::Path;
use std::process::ExitCode;

use super::{FILE_BYTES_MAX, secrecy};
use crate::arguments::Train;
use crate::cluster::launch::Output;
use crate::cluster::launch::group::{self, Ended, Start};
use crate::cluster::launch::{local, ssh};
use crate::cluster::spec::{ClusterFile, Hosts, PORT, Variables, from_environment};
use crate::cluster::{Job, Member};
use crate::comm::Token;
use crate::command::{Outcome, restart};
use crate::failure::Failure;
use crate::system::disk::Disk;
use crate::system::signal::Stop;
use crate::train::Config;
use crate::train::together::Carry;

/// What this process is.
pub enum Role {
    /// All there is; it may have several ranks.
    Alone,
    /// The one that starts the others.
    Launcher(Vec<Start>),
    /// One of several.
    Member(Box<Member>),
}

/// Finds out what this process is.
pub fn role(arguments: &Train, config: &Config, variables: &Variables) -> Result<Role, Failure> {
    if config.carry == Carry::MPI && !cfg!(feature = "mpi") {
        return Err(Failure::refused(
            "this paceline was built without MPI; with mpicc and libclang installed, type: cargo install --path . --features mpi",
        ));
    }
    if config.keeps_one_process() && (arguments.cluster.is_some() || arguments.hosts.is_some()) {
        let (flag, instead) = one_process(config);
        return Err(Failure::refused(format!(
            "{flag} keeps all ranks in one process of one machine; for several machines type {instead}"
        )));
    }
    if let Some(file) = &arguments.cluster {
        return Ok(Role::Member(Box::new(from_file(file, arguments.job, arguments.task)?)));
    }
    let member = from_launcher(config, variables)?;
    check_threads(config, member.as_ref())?;
    if let Some(member) = member {
        return Ok(Role::Member(Box::new(member)));
    }
    if config.carry == Carry::MPI {
        let workers = config.workers.max(2);
        return Err(Failure::refused(format!(
            "--carry mpi is for processes that mpirun starts; type: mpirun -n {workers} paceline train --carry mpi …"
        )));
    }
    let here = config.ranks() < 2 || config.has_rank_threads();
    if arguments.hosts.is_none() && here && !restart::is_asked(arguments) {
        return Ok(Role::Alone);
    }
    Ok(Role::Launcher(starts(arguments, config, words(arguments, config))?))
}

/// What the processes of a launcher are started with: what this one was.
pub fn words(arguments: &Train, config: &Config) -> Vec<String> {
    let mut words = arguments.words();
    let is_told = arguments.workers.is_some() || arguments.replicas.is_some();
    if !is_told && arguments.resume.is_none() && arguments.hosts.is_none() {
        words.extend(["--workers".to_owned(), config.workers.to_string()]);
    }
    // What was found out here is told.
    if arguments.split.as_ref() != Some(&config.split) && config.stages() > 1 {
        words.extend(["--split".to_owned(), config.split.to_string()]);
    }
    words
}

/// The processes of a run, started with these words.
pub fn starts(arguments: &Train, config: &Config, words: Vec<String>) -> Result<Vec<Start>, Failure> {
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut starts = if let Some(hosts) = &arguments.hosts {
        let (hosts, folder) = (Hosts::parse(hosts)?, std::env::current_dir().map_err(Failure::failed)?);
        ssh::Ssh {
            hosts,
            port: arguments.port.unwrap_or(PORT),
            program,
            arguments: words,
            folder,
            ssh: vec!["ssh".into()],
        }
        .starts()?
    } else {
        let (workers, servers) =
            if config.has_rank_threads() { (1, 0) } else { (config.ranks(), config.server_count()) };
        // Files that all processes would refuse are refused once.
        arguments.tls.as_deref().map(|files| secrecy(files, &Token::random())).transpose()?;
        local::Local { workers, servers, program, arguments: words, pin: config.pin }.starts()?
    };
    starts[0].inherits = true;
    if config.goes_on_without_workers() {
        starts[1..config.workers].iter_mut().for_each(|start| start.spare = true);
    }
    for start in &mut starts[1..] {
        start.arguments.retain(|word| word != "--json");
        if !arguments.quiet {
            start.arguments.push("--quiet".into());
        }
    }
    Ok(starts)
}

/// The member that a launcher says this process is, if there is one.
pub fn from_launcher(config: &Config, variables: &Variables) -> Result<Option<Member>, Failure> {
    let Some(member) = from_environment(variables)? else { return Ok(None) };
    Ok(Some(if member.world > 1 { member.with_servers(config.server_count())? } else { member }))
}

/// Refuses several processes of which each would have all ranks.
pub fn check_threads(config: &Config, member: Option<&Member>) -> Result<(), Failure> {
    let Some(member) = member.filter(|member| member.world > 1 && config.keeps_one_process()) else { return Ok(()) };
    let (flag, instead) = one_process(config);
    Err(Failure::refused(format!(
        "{flag} and --replicas keep all ranks in one process, and by {} there are {}; \
         type {instead} in their place, or start one process",
        member.source, member.world
    )))
}

/// What keeps all ranks in one process, and what to type in its place.
fn one_process(config: &Config) -> (String, &'static str) {
    match config.agree.recipe().shares_process() {
        true => (format!("--agree {}", config.agree.name()), "--agree all-reduce --carry auto"),
        false => ("--carry thread".into(), "--carry auto"),
    }
}

/// The member of a cluster file that this process was told to be.
pub fn from_file(file: &Path, job: Option<Job>, task: Option<usize>) -> Result<Member, Failure> {
    let text = Disk::real().read_text_within(file, FILE_BYTES_MAX)?;
    let (Some(job), Some(task)) = (job, task) else {
        return Err(Failure::refused("--cluster needs to know which process this is; type --job worker --task 0"));
    };
    Ok(ClusterFile::parse(&text)?.member(job, task)?)
}

/// Starts the others and waits for them.
pub fn launch(starts: &[Start]) -> Outcome {
    launch_until(starts, &Stop::on_signals().map_err(Failure::failed)?)
}

/// As [`launch`], with what else may ask for the end.
pub fn launch_until(starts: &[Start], stop: &Stop) -> Outcome {
    let ended = group::run(starts, stop, &Output::to(std::io::stdout()), &Output::to(std::io::stderr()))?;
    Ok(exit_code(ended, stop))
}

/// What a launcher answers: of processes that were told to end and did so in good order, the signal.
pub fn exit_code(ended: Ended, stop: &Stop) -> ExitCode {
    match ended {
        Ended::Done => ExitCode::SUCCESS,
        Ended::Failed { refused, .. } => ExitCode::from(if refused { 2 } else { 1 }),
        Ended::Interrupted { in_order: true } => stop.signal().exit_code().into(),
        Ended::Interrupted { in_order: false } => ExitCode::FAILURE,
    }
}
