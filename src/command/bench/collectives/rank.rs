//! One rank of `bench collectives`: a process that connects with the others, measures with them, and says what it found.

use std::io::{BufRead, Read};
use std::net::SocketAddr;
use std::process::ExitCode;

use crate::comm::transport::{Membership, Transport, shm, tcp};
use crate::comm::wire::Tls;
use crate::comm::{Communicator, Generation, Rank, RunId, Stop, Token, Wait};
use crate::system::{cores, host, threads};
use serde_json::Value;

use super::measure::{Row, measure};
use super::{TIMEOUT, TOKEN, core, options};
use crate::arguments::{BenchCollectivesRank, Carry};
use crate::command::{Outcome, print, print_json};
use crate::failure::Failure;

/// Runs the rank.
pub fn run(arguments: &BenchCollectivesRank) -> Outcome {
    let (rank, bench) = (Rank(arguments.rank), &arguments.bench);
    let world = bench.workers[0];
    let refusal = || Failure::refused("this is a part of `paceline bench collectives`: type that");
    let token = host::variable(TOKEN).and_then(|text| Token::from_hex(&text)).ok_or_else(refusal)?;
    let _bound = core(rank.index(), world).and_then(cores::bind);
    let listener = tcp::Listener::bind(rank, None)?;
    print(&format!("{}\n", listener.address()));
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).map_err(Failure::failed)?;
    let addresses: Vec<SocketAddr> = line.split_whitespace().filter_map(|address| address.parse().ok()).collect();
    if addresses.len() != world {
        return Err(refusal());
    }
    let stop = Stop::new();
    end_with_the_parent(&stop)?;
    let wait = Wait::new(TIMEOUT, &stop);
    let membership = Membership { token, run: RunId::UNKNOWN, rank, world, generation: Generation(0) };
    let transport = if bench.carry[0] == Carry::Shm {
        Transport::Shm(shm::connect(&membership, &wait)?)
    } else {
        let tls = bench.tls.then(|| Tls::from_token(&membership.token));
        let (sockets, buffer_bytes) = (bench.sockets, bench.buffer_bytes);
        let config = tcp::Config { sockets, buffer_bytes, tls, ..tcp::Config::default() };
        Transport::Tcp(tcp::connect(listener, &addresses, &membership, config, &wait)?)
    };
    let mut comm = Communicator::new(transport, options(world, &stop));
    let rows = measure(&mut comm, bench)?;
    if rank.0 == 0 {
        let rows: Vec<Value> = rows.iter().map(Row::to_json).collect();
        print_json(&rows);
    }
    Ok(ExitCode::SUCCESS)
}

/// The parent holds the other end of our input: when it ends, however it does, so does every wait here.
fn end_with_the_parent(stop: &Stop) -> Result<(), Failure> {
    let stop = stop.clone();
    let body = move || {
        let mut rest = [0; 1];
        while matches!(std::io::stdin().lock().read(&mut rest), Ok(1..)) {}
        stop.set("the process that started this rank has ended");
    };
    threads::spawn("parent", body).map(drop).map_err(Failure::failed)
}
