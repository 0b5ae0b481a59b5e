//! How processes of one host come to share memory: rank 0 listens on a socket whose name follows from the token and the run,
//! greets the others and hands over the memory. The socket is in the abstract namespace and the memory
//! has no name at all, so there is nothing to clean up, whoever is killed when.

use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use paceline_system::{clock, cores};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sha2::Sha256;

use super::layout::{CONTROL_BYTES, FILE_BYTES, Layout, PROCESS, STATE, State};
use super::{Arena, Memory, Port, Processes};
use crate::error::CommError;
use crate::rank::Rank;
use crate::transport::Membership;
use crate::wait::Wait;
use crate::wire::hello::{Identity, Peer, Purpose, Role, greet};
use crate::wire::lobby::{Greeted, Lobby};
use crate::wire::passing;
use crate::wire::stream::{Talk, is_retry};

const PHASE: &str = "sharing memory";
/// Connections taken before those that are being greeted have their turn.
const TURN_MAX: usize = 32;
/// Looks at a word before sleeping, about twenty microseconds; almost none where ranks outnumber cores.
const SPINS: u32 = 4000;

/// Joins the memory of a world; all its ranks call this on the same host.
///
/// # Errors
/// When a rank does not come in time, or the system has no memory to share.
pub fn connect(membership: &Membership, wait: &Wait) -> Result<Port, CommError> {
    let Membership { rank, world, .. } = *membership;
    let system = |what| move |source: std::io::Error| CommError::System { rank, what, source };
    let file = if rank.0 == 0 {
        let file = create().map_err(|error| system("create shared memory")(error.into()))?;
        hand_out(&file, membership, wait)?;
        file
    } else {
        fetch(membership, wait)?
    };
    let file = Arc::new(file);
    let layout = Layout::new(world);
    let memory = Memory::map(&file, 0, layout.bytes()).map_err(|error| system("map shared memory")(error.into()))?;
    let block = |rank: usize| rank * CONTROL_BYTES;
    memory.word32(block(rank.index()) + PROCESS).store(std::process::id(), Ordering::Relaxed);
    memory.word32(block(rank.index()) + STATE).store(State::Here as u32, Ordering::Release);
    let mut processes = Processes::with_capacity(world);
    for peer in 0..world {
        let state = memory.word32(block(peer) + STATE);
        while state.load(Ordering::Acquire) == 0 {
            wait.check(rank, Rank::at(peer), PHASE)?;
            clock::sleep(Duration::from_micros(100));
        }
        let id = memory.word32(block(peer) + PROCESS).load(Ordering::Relaxed);
        // A process that cannot be watched, say in another container, is still found out by the deadline.
        let watched = Pid::from_raw(id.cast_signed()).filter(|_| id != std::process::id());
        processes.push(watched.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok()).map(Arc::new));
    }
    let spins = if cores::online() >= world { SPINS } else { 20 };
    Port::open((Arena::new(file, rank, 0), None), rank.index(), processes, spins)
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// Memory that nobody can make smaller under the others.
fn create() -> rustix::io::Result<OwnedFd> {
    let file = memfd_create("paceline", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, FILE_BYTES)?;
    fcntl_add_seals(&file, seals())?;
    Ok(file)
}

/// The name of the socket: told by the token and the run, and tells neither. Two runs of one user have two.
fn address(membership: &Membership) -> std::io::Result<SocketAddr> {
    let mut mac = Hmac::<Sha256>::new_from_slice(membership.token.bytes()).expect("a key may have any length");
    mac.update(b"shared memory");
    mac.update(membership.run.bytes());
    mac.update(&membership.generation.0.to_le_bytes());
    let digest = mac.finalize().into_bytes();
    let name: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("paceline-{name}"))
}

/// Rank 0: greets the others in whatever order they come and gives each the memory.
fn hand_out(file: &OwnedFd, membership: &Membership, wait: &Wait) -> Result<(), CommError> {
    let rank = membership.rank;
    let listen = || {
        let listener = UnixListener::bind_addr(&address(membership)?)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let listener = listen().map_err(|source| CommError::System { rank, what: "listen for its own host", source })?;
    let mut identity = membership.identity(Purpose::Memory, Role::Listener);
    let mut lobby = Lobby::new(membership.world - 1);
    while identity.taken.len() + 1 < membership.world {
        let missing = (1..membership.world).map(Rank::at).find(|rank| !identity.taken.contains(rank));
        wait.check(rank, missing.unwrap_or(rank), PHASE)?;
        accept(&listener, &mut lobby, &identity, wait);
        for Greeted { outcome, .. } in lobby.advance() {
            // Whoever is refused or leaves again is nobody; who belongs here comes again.
            let Ok((peer, stream)) = outcome else { continue };
            if !identity.taken.contains(&peer.rank) && give(&stream, file, &identity, peer).is_ok() {
                identity.taken.push(peer.rank);
            }
        }
        if identity.taken.len() + 1 < membership.world {
            lobby.sleep(&listener, wait.slice());
        }
    }
    Ok(())
}

/// Begins to greet all who have come.
fn accept(listener: &UnixListener, lobby: &mut Lobby<UnixStream>, identity: &Identity, wait: &Wait) {
    for _ in 0..TURN_MAX {
        match listener.accept() {
            Ok((stream, _)) => {
                if stream.set_nonblocking(true).is_ok() {
                    lobby.enter(stream, identity.clone(), (None, wait));
                }
            }
            Err(error) if is_retry(&error) => return,
            // No descriptor is left.
            Err(_) => return lobby.make_way(),
        }
    }
}

fn give(stream: &UnixStream, file: &OwnedFd, identity: &Identity, peer: Peer) -> Result<(), CommError> {
    let talk = Talk { rank: identity.rank, peer: peer.rank.into(), phase: PHASE };
    passing::send(stream, file.as_fd()).map_err(|error| talk.gone(error))
}

/// The others: come until rank 0 is there and gives them the memory.
fn fetch(membership: &Membership, wait: &Wait) -> Result<OwnedFd, CommError> {
    let rank = membership.rank;
    let talk = Talk { rank, peer: Rank(0).into(), phase: PHASE };
    let identity = membership.identity(Purpose::Memory, Role::Dialler).expecting(Rank(0));
    let address =
        address(membership).map_err(|source| CommError::System { rank, what: "name a socket of its host", source })?;
    loop {
        talk.check(wait)?;
        let Ok(mut stream) = UnixStream::connect_addr(&address) else {
            clock::sleep(Duration::from_millis(1));
            continue;
        };
        match greet(&mut stream, &identity, wait) {
            Ok(_) => return receive_file(&stream, &talk, wait),
            Err(refused) if refused.is_refusal() => return Err(refused),
            // It ended while greeting us: perhaps another one comes.
            Err(CommError::PeerGone { .. }) => clock::sleep(Duration::from_millis(1)),
            Err(error) => return Err(error),
        }
    }
}

fn receive_file(stream: &UnixStream, talk: &Talk, wait: &Wait) -> Result<OwnedFd, CommError> {
    loop {
        talk.check(wait)?;
        match passing::receive(stream) {
            Ok(file) => {
                let file = file.ok_or_else(|| talk.gone("it sent no memory"))?;
                // Only memory that cannot shrink under us is mapped: touching what is gone would end this process.
                let sealed = fcntl_get_seals(&file).is_ok_and(|found| found.contains(seals()));
                let whole = fstat(&file).is_ok_and(|about| about.st_size as u64 == FILE_BYTES);
                return if sealed && whole { Ok(file) } else { Err(talk.violation("its memory is not sealed")) };
            }
            Err(error) if is_retry(&error.into()) => {}
            Err(error) => return Err(talk.gone(error)),
        }
    }
}
