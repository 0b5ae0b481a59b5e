//! `paceline doctor`: what this machine and the links to others can do, measured, and the settings that follow.
//!
//! Sections, in the order in which they are printed: machines, GPUs, links, advice. Each is a JSON value made by one file
//! of this folder and printed by the same file.

mod advice;
mod gpus;
mod links;
mod machine;

use std::process::ExitCode;

use crate::cluster::launch::child;
use crate::cluster::launch::ssh::Ssh;
use crate::cluster::spec::{Hosts, from_environment};
use crate::cluster::{JoinOptions, Log, Member};
use crate::system::host;
use crate::system::signal::Stop;
use serde_json::{Value, json};

use super::{Outcome, note, print, print_json, team};
use crate::arguments::doctor::Doctor;
use crate::failure::Failure;
use crate::train::deadlines::Deadlines;
use links::{Found, Mesh};

/// Runs the command: on this machine alone, as the launcher of others, or as one of several.
pub fn run(arguments: &Doctor) -> Outcome {
    let member = match &arguments.cluster {
        Some(file) => Some(team::from_file(file, arguments.job, arguments.task)?),
        None => from_environment(&host::variables())?,
    };
    match (member, &arguments.hosts) {
        (Some(member), _) if member.world > 1 => together(member, arguments),
        (None, Some(hosts)) => launch(&Hosts::parse(hosts)?, arguments),
        _ => alone(arguments),
    }
}

fn alone(arguments: &Doctor) -> Outcome {
    let found = links::inside()?;
    tell(&[machine::look(true)], &found, None, arguments);
    Ok(ExitCode::SUCCESS)
}

fn tell(machines: &[Value], found: &Found, hosts: Option<&str>, arguments: &Doctor) {
    let (gpus, advice) = (gpus::look(), advice::from(machines, found, hosts));
    if arguments.json {
        let rows: Vec<Value> = found.rows.iter().map(links::Row::to_json).collect();
        let all = json!({"machines": machines, "gpus": gpus, "links": rows, "advice": advice.to_json()});
        print_json(&all);
        return;
    }
    let machines: String = machines.iter().map(machine::lines).collect();
    print(&format!("{machines}{}{}{}", gpus::lines(&gpus), links::lines(&found.rows), advice.lines()));
}

/// Starts this command on the hosts.
fn launch(hosts: &Hosts, arguments: &Doctor) -> Outcome {
    let program = host::own_program().map_err(Failure::failed)?;
    let folder = host::own_folder().map_err(Failure::failed)?;
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let (hosts, ssh) = (hosts.clone(), vec!["ssh".into()]);
    let mut starts = Ssh { hosts, port: arguments.port, program, arguments: words, folder, ssh }.starts()?;
    if starts.len() < 2 {
        return Err(Failure::refused("a link has two ends; type two or more hosts: --hosts a,b"));
    }
    // The first speaks for all.
    starts[0].inherits = true;
    team::launch(&starts)
}

/// One of several: measures with the others; rank 0 speaks.
fn together(member: Member, arguments: &Doctor) -> Outcome {
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    let token = child::begin(&host::variables(), &stop)?;
    let mut options = JoinOptions::new(member.clone(), token.clone(), "doctor".into());
    (options.interrupt, options.bind) = (stop, arguments.bind);
    options.log = Log::new(|notice| {
        if notice.warning {
            note(&notice.text);
        }
    });
    let (control, listener) = team::arrive(options)?;
    let (rank, nodes) = (member.rank.index(), control.table().nodes().to_vec());
    let typed = arguments.hosts.as_deref().map(Hosts::parse).transpose()?;
    let hosts = typed.map_or(member.hosts, |hosts| hosts.by_rank());
    let measured = Mesh::new(&control, listener, token, rank).and_then(|mut mesh| {
        // Of several processes on a machine one looks at it.
        let first = !nodes[..rank].contains(&nodes[rank]);
        let machines = mesh.gather(&if first { machine::look(true) } else { Value::Null })?;
        Ok((machines, mesh.between(&hosts)?))
    });
    let (machines, found) = match measured {
        Ok(measured) => measured,
        Err(error) => {
            let verdict = control.fail(&error.to_string(), error.peer());
            return Err(Failure::failed(verdict.map_or_else(|| error.to_string(), |verdict| verdict.to_string())));
        }
    };
    if rank == 0 {
        let machines: Vec<Value> = machines.into_iter().filter(|machine| !machine.is_null()).collect();
        tell(&machines, &found, arguments.hosts.as_deref(), arguments);
    }
    control.finish(Deadlines::default().farewell)?;
    Ok(ExitCode::SUCCESS)
}
