//! `paceline launch`: the processes of a run, here or elsewhere.

use std::process::{Command, ExitCode};

use crate::cluster::launch::group::{self, Start};
use crate::cluster::launch::kubernetes::Kubernetes;
use crate::cluster::launch::local::Local;
use crate::cluster::launch::mpirun::{Flavour, Mpirun};
use crate::cluster::launch::slurm::Slurm;
use crate::cluster::launch::{Output, ssh::Ssh};
use crate::cluster::spec::Hosts;
use crate::cluster::token;
use crate::comm::Token;
use crate::system::host;
use crate::system::signal::{Signal, Stop};

use super::team::{exit_code, room};
use super::{Outcome, print};
use crate::arguments::launch::Launch;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Launch) -> Outcome {
    let hosts = arguments.hosts.as_deref().map(Hosts::parse).transpose()?;
    if arguments.slurm {
        print(&slurm(arguments)?.script()?);
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.kubernetes {
        print(&kubernetes(arguments)?.manifest()?);
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.mpirun {
        return mpirun(arguments, hosts);
    }
    let program = host::own_program().map_err(Failure::failed)?;
    let starts = match hosts {
        Some(_) if arguments.workers.is_some() => {
            return Err(Failure::refused(
                "--hosts says how many processes there are (a:2 for two on a); leave --workers away",
            ));
        }
        Some(hosts) => {
            let ssh = arguments.ssh.split_whitespace().map(str::to_owned).collect();
            let folder = host::own_folder().map_err(Failure::failed)?;
            let program = arguments.program.clone().map_or(program, Into::into);
            Ssh { hosts, port: arguments.port, program, arguments: arguments.command.clone(), folder, ssh }.starts()?
        }
        None => {
            let (pin, workers) = (!arguments.no_pin, workers(arguments)?);
            room::cores_suffice(workers, arguments.oversubscribe)?;
            Local { workers, servers: 0, program, arguments: arguments.command.clone(), pin }.starts()?
        }
    };
    supervise(&starts)
}

fn supervise(starts: &[Start]) -> Outcome {
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    let (out, err) = (Output::to(std::io::stdout()), Output::to(std::io::stderr()));
    Ok(exit_code(group::run(starts, &stop, &out, &err)?, &stop))
}

fn workers(arguments: &Launch) -> Result<usize, Failure> {
    arguments.workers.ok_or_else(|| Failure::refused("how many processes? type --workers N, or --hosts A,B"))
}

/// This program with what stands behind the two dashes.
fn command(arguments: &Launch) -> Result<Vec<String>, Failure> {
    let program = host::own_program().map_err(Failure::failed)?;
    Ok(std::iter::once(program.display().to_string()).chain(arguments.command.iter().cloned()).collect())
}

fn slurm(arguments: &Launch) -> Result<Slurm, Failure> {
    let (nodes, workers) = (arguments.nodes, arguments.workers.unwrap_or(arguments.nodes));
    if !workers.is_multiple_of(nodes) {
        return Err(Failure::refused(format!(
            "{workers} processes do not share {nodes} nodes evenly; change --workers"
        )));
    }
    Ok(Slurm {
        nodes,
        tasks_per_node: workers / nodes,
        cores: arguments.cores,
        time: arguments.time.clone(),
        partition: arguments.partition.clone(),
        command: command(arguments)?,
    })
}

fn kubernetes(arguments: &Launch) -> Result<Kubernetes, Failure> {
    Ok(Kubernetes {
        name: arguments.name.clone(),
        image: arguments.image.clone().unwrap_or_default(),
        workers: workers(arguments)?,
        cores: arguments.cores,
        port: arguments.port,
        command: std::iter::once("paceline".to_owned()).chain(arguments.command.iter().cloned()).collect(),
    })
}

fn mpirun(arguments: &Launch, hosts: Option<Hosts>) -> Outcome {
    let workers = if hosts.is_some() { 0 } else { workers(arguments)? };
    let flavour = Flavour::find("mpirun")?;
    let words = Mpirun { workers, hosts, port: arguments.port, command: command(arguments)? }.arguments(flavour);
    // Ctrl-C reaches mpirun from the terminal; this process waits for it to end.
    let _stop = Stop::on_signals().map_err(Failure::failed)?;
    let ended = Command::new("mpirun").args(words).env(token::VARIABLE, Token::random().to_hex()).status();
    let ended = ended.map_err(|error| Failure::failed(format!("mpirun did not run: {error}")))?;
    Ok(match ended.code() {
        Some(0) => ExitCode::SUCCESS,
        Some(code) if Signal::is_exit_code(code) => ExitCode::from(code as u8),
        _ => ExitCode::FAILURE,
    })
}
