//! `paceline serve`: what this machine does for runs of others. `memory`: it lends its memory.

use std::net::SocketAddr;
use std::process::ExitCode;

use serde_json::json;

use crate::comm::memory_box::{BoxServer, Limits, ServerOptions};
use crate::system::host::{Host, free_memory_bytes};
use crate::system::limits::in_words;
use crate::system::printable::printable;
use crate::system::signal::Stop;

use super::{Outcome, note, print, print_json};
use crate::arguments::{Lend, LendCommand, LendMemory};
use crate::failure::Failure;
use crate::run::elsewhere;

/// Regions that a box lends at a time: each is a file of the process.
const REGIONS_MAX: usize = 500;

/// Runs the command.
pub fn run(arguments: &Lend) -> Outcome {
    match &arguments.command {
        LendCommand::Memory(arguments) => memory(arguments),
    }
}

/// Lends memory until a signal ends it.
fn memory(arguments: &LendMemory) -> Outcome {
    let listen = &arguments.listen;
    let place: SocketAddr = listen.parse().map_err(|_| {
        Failure::refused(format!("`{listen}` is no address and port; type --listen such as 10.0.0.1:29411"))
    })?;
    let free = free_memory_bytes();
    if arguments.pool > free {
        return Err(Failure::refused(format!(
            "--pool {} is more than the {} that are free on this machine; type a smaller --pool",
            in_words(arguments.pool),
            in_words(free)
        )));
    }
    let bytes_max = arguments.limit.unwrap_or(free / 2).max(arguments.pool);
    let client_bytes_max = arguments.quota.unwrap_or(bytes_max);
    let limits = Limits { bytes_max, client_bytes_max, regions_max: REGIONS_MAX };
    let secrets = elsewhere::options(arguments.tls.as_deref())?;
    let options = ServerOptions { token: secrets.token, tls: secrets.tls, pool_bytes: arguments.pool, limits };
    let server = BoxServer::bind(place, options).map_err(|error| {
        Failure::refused(format!("cannot lend memory at {place}: {error}; type another --listen or a smaller --pool"))
    })?;
    let address = server.address().map_err(Failure::failed)?;
    let typed = match address.ip().is_unspecified() {
        true => format!("{}:{}", printable(&Host::look().name), address.port()),
        false => address.to_string(),
    };
    let tls = if arguments.tls.is_some() { " --tls" } else { "" };
    if arguments.json {
        print_json(&json!({ "address": address.to_string(), "pool_bytes": arguments.pool, "bytes_max": bytes_max }));
    } else {
        print(&format!(
            "lending up to {} of memory at {address}, {} of it taken already; others type --agree shm-async --box {typed}{tls}\n",
            in_words(bytes_max),
            in_words(arguments.pool)
        ));
    }
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    server.serve(&mut || stop.requested(), &mut |sentence| note(sentence));
    let usage = server.usage();
    note(&format!("ended with {} regions of {} clients", usage.regions, usage.clients));
    Ok(ExitCode::SUCCESS)
}
