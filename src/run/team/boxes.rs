//! Memory boxes of a run: those that it was given, or its servers' own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};

use crate::cluster::control::Control;
use crate::comm::memory_box::Lending;
use crate::comm::wire::Tls;
use crate::comm::{Rank, Token};
use crate::failure::Failure;
use crate::run::elsewhere;
use crate::train::Config;

/// Where they are, for agreements that use them. A box that somebody else has started has the token of files, as other
/// lenders do; a server's own has the run's, and listens where the server does.
pub(super) fn lending(
    config: &Config,
    files: Option<&str>,
    (control, rank): (&Control, Rank),
    (token, tls): (&Token, &Option<Tls>),
) -> Result<Option<Lending>, Failure> {
    if !config.agree.recipe().borrows_memory() {
        return Ok(None);
    }
    let boxes: Vec<SocketAddr> = config.center.boxes.iter().map(|place| find(place)).collect::<Result<_, _>>()?;
    let data = control.table().entries().get(rank.index()).and_then(|entry| entry.data);
    let listen = data.map(|address| address.ip()).filter(|ip| !ip.is_unspecified());
    let listen = listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let (token, tls) = if boxes.is_empty() {
        (token.clone(), tls.clone())
    } else {
        let secrets = elsewhere::options(files)?;
        (secrets.token, secrets.tls)
    };
    Ok(Some(Lending { token, tls, boxes, listen }))
}

fn find(place: &str) -> Result<SocketAddr, Failure> {
    let refused =
        |why: String| Failure::refused(format!("--box {place}: {why}; type for example --box 10.0.0.1:29411"));
    let mut found = place.to_socket_addrs().map_err(|error| refused(error.to_string()))?;
    found.next().ok_or_else(|| refused("the name has no address".into()))
}
