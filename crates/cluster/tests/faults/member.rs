//! What the test program is when it is started as a process of a run: a member that meets the others, beats and steps,
//! or a launcher of such members. It prints what it is told, and its exit code is Paceline's.

use std::process::ExitCode;
use std::time::Duration;

use paceline_cluster::launch::{Ended, Output, child, group, local::Local};
use paceline_cluster::spec::{Variables, from_environment};
use paceline_cluster::{ClusterError, JoinOptions, Limits, Log, Phase, join};
use paceline_comm::Rank;
use paceline_system::clock::{self, Clock};
use paceline_system::{host, signal};

pub fn member(variables: &Variables) -> ExitCode {
    match take_part(variables) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::from(if error.is_refusal() { 2 } else { 1 })
        }
    }
}

fn milliseconds(variables: &Variables, name: &str, otherwise: u64) -> Duration {
    let number = variables.get(name).map_or(otherwise * 1000, |text| text.parse().unwrap());
    Duration::from_micros(number)
}

fn take_part(variables: &Variables) -> Result<(), ClusterError> {
    let interrupt = signal::Stop::on_signals().unwrap();
    let token = child::begin(variables, &interrupt)?;
    let member = from_environment(variables)?.expect("the test sets RANK");
    let limits = Limits {
        gather: milliseconds(variables, "MEMBER_GATHER_US", 20_000),
        beat: milliseconds(variables, "MEMBER_BEAT_US", 500),
        ..Limits::default()
    };
    let log = Log::new(|notice| println!("log: {}", notice.text));
    let options = JoinOptions {
        limits,
        log,
        interrupt: interrupt.clone(),
        ..JoinOptions::new(member, token, "same = true".into())
    };
    let control = join(options, |_| Ok(None))?;
    println!("joined");
    let (clock, length) = (Clock::real(), milliseconds(variables, "MEMBER_US", 60_000));
    // Those whose heartbeats come here.
    let mut silent: Vec<Rank> = (0..control.table().entries().len()).map(Rank::at).collect();
    silent.retain(|rank| *rank != control.rank() && (control.rank() == Rank(0) || *rank == Rank(0)));
    let (mut step, mut said) = (0, false);
    while clock.now() < length && control.stop().reason().is_none() && !interrupt.requested() {
        control.progress().enter(Phase::Exchange, step);
        step += 1;
        silent.retain(|rank| control.position_of(*rank).is_none_or(|position| position.phase != Phase::Exchange));
        if silent.is_empty() && !said {
            println!("all step");
            said = true;
        }
        // What a step takes.
        clock::sleep(Duration::from_millis(5));
    }
    if let Some(reason) = control.stop().reason() {
        return Err(ClusterError::Failed(reason.to_owned()));
    }
    if interrupt.requested() {
        println!("saved");
    }
    control.finish(Duration::from_secs(10))
}

pub fn launcher(variables: &Variables) -> ExitCode {
    let stop = signal::Stop::on_signals().unwrap();
    let program = host::own_program().unwrap();
    let mut starts = Local { workers: 2, program, arguments: Vec::new(), pin: true }.starts().unwrap();
    for start in &mut starts {
        start.variables.push(("FAULT_ROLE".into(), "member".into()));
        start.variables.extend(variables.get("MEMBER_US").map(|length| ("MEMBER_US".into(), length.clone())));
    }
    let output = Output::to(std::io::stdout());
    match group::run(&starts, &stop, &output, &output) {
        Ok(Ended::Done) => ExitCode::SUCCESS,
        Ok(Ended::Interrupted { .. }) => {
            println!("interrupted");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("error: {error}");
            ExitCode::from(if error.is_refusal() { 2 } else { 1 })
        }
    }
}
