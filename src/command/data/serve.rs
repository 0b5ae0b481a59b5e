//! `paceline data serve`: lends a folder of photographs to those who train on it on other machines.

use std::process::ExitCode;

use crate::cluster::samples::{LISTING_BYTES_MAX, Server};
use crate::data::OpenOptions;
use crate::data::far::Lender;
use crate::system::host::Host;
use crate::system::printable::printable;
use crate::system::signal::Stop;
use crate::train::Registry;

use crate::arguments::Serve;
use crate::command::{Outcome, grouped, note, print, surroundings};
use crate::failure::Failure;
use crate::run::elsewhere::{answer, options};

/// Runs the command, until a signal ends it.
pub fn run(arguments: &Serve, registry: &Registry) -> Outcome {
    let around = surroundings(registry);
    let spec = registry.parse(&arguments.spec)?;
    let opening = OpenOptions { data_home: around.data_home, ..OpenOptions::default() };
    let lender = Lender::open(&spec, &opening, &around.disk)?;
    let listing = lender.listing()?;
    let (name, files) = (listing.name.clone(), listing.train.len() + listing.val.len());
    let listing = listing.encode();
    if listing.len() as u64 > LISTING_BYTES_MAX {
        return Err(Failure::refused(format!(
            "a list of {files} names is too long to be sent; give them shorter names"
        )));
    }
    let answers = move |question: &_| answer(&lender, &listing, question);
    let server = Server::bind(&arguments.listen, options(arguments.tls.as_deref())?, answers)?;
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    let address = server.address()?;
    let (files, name) = (grouped(files as u64), printable(&name));
    // At all addresses of this machine is at its name, for others.
    let typed = match address.ip().is_unspecified() {
        true => format!("{}:{}", printable(&Host::look().name), address.port()),
        false => address.to_string(),
    };
    let tls = if arguments.tls.is_some() { " --tls" } else { "" };
    print(&format!("lending {files} files of {name} at {address}; others type --data remote:{typed}{tls}\n"));
    server.serve(&stop, &mut |sentence| note(sentence));
    Ok(ExitCode::SUCCESS)
}
