//! How the members of a run find each other. Rank 0 listens; every other rank connects, retrying until the deadline,
//! greets with the token, and says where it listens for data and what it is going to do. Rank 0 answers with the table
//! of all once all are there. The connections stay and carry heartbeats ([`crate::control`]).

pub(crate) mod door;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use paceline_comm::wire::{Identity, Purpose, Role, Socket, Tls, greet};
use paceline_comm::{CommError, Generation, RunId, Stop, Token, Wait};
use paceline_system::clock::{self, Clock};
use paceline_system::host::{self, Host};
use paceline_system::{ready, signal};

use crate::ClusterError;
use crate::connection::Connection;
use crate::control::Control;
use crate::error::refused;
use crate::membership::Limits;
use crate::message::{CONFIG_BYTES_MAX, Message};
use crate::notice::Log;
use crate::spec::{Address, Member};
use crate::table::{Entry, Table};

/// What a process joins a run with.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// Which member it is.
    pub member: Member,
    /// The run's secret.
    pub token: Token,
    /// Which run: rank 0 draws it when it joins, and the others learn it from rank 0.
    pub run: RunId,
    /// Which incarnation of the run.
    pub generation: Generation,
    /// What it is going to do, one setting a line. All members must say the same; where they do not, the first line that
    /// differs is shown.
    pub config: String,
    /// The address that rank 0 listens on, where it should not follow from the member.
    pub bind: Option<IpAddr>,
    /// A name for this machine other than its own: members that say the same count as being on one machine.
    pub node: Option<String>,
    /// Rank 0: whether its port stays open when all are there, for ranks that are lost and come back.
    pub keeps_door: bool,
    /// Whether and how the control connections are secret; the same for all members.
    pub tls: Option<Tls>,
    /// Workers that are given the same portions of the data, of which each computes its part.
    pub group: usize,
    /// How long what may take.
    pub limits: Limits,
    /// Set with the reason when the run has to end; looked at while waiting.
    pub stop: Stop,
    /// Ctrl-C, looked at while waiting for the others.
    pub interrupt: signal::Stop,
    /// Where sentences go.
    pub log: Log,
}

impl JoinOptions {
    /// With the usual limits.
    pub fn new(member: Member, token: Token, config: String) -> Self {
        Self {
            member,
            token,
            run: RunId::UNKNOWN,
            generation: Generation::default(),
            config,
            bind: None,
            node: None,
            keeps_door: false,
            tls: None,
            group: 1,
            limits: Limits::default(),
            stop: Stop::new(),
            interrupt: signal::Stop::new(),
            log: Log::silent(),
        }
    }

    pub(crate) fn identity(&self) -> Identity {
        let (rank, world) = (self.member.rank, self.member.world as u32);
        let (role, expected) = if rank.0 == 0 { (Role::Listener, 1..world) } else { (Role::Dialler, 0..1) };
        let identity = Identity::new(&self.token, Purpose::Control, role, rank, world);
        Identity { run: self.run, generation: self.generation, expected, ..identity }
    }

    pub(crate) fn entry(&self, data: Option<SocketAddr>) -> Entry {
        Entry {
            data,
            host: Host::look().name,
            node: self.node.clone().unwrap_or_else(host::node_id),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    fn interrupted(&self) -> Result<(), ClusterError> {
        match (self.interrupt.requested(), self.stop.reason()) {
            (true, _) => Err(ClusterError::Failed("interrupted while waiting for the other ranks".into())),
            (_, Some(reason)) => Err(ClusterError::Failed(reason.to_owned())),
            _ => Ok(()),
        }
    }
}

/// Meets the other members. `listen` is called once with the address that the others can reach this process at, with port 0 unless
/// the member names its own; it opens the listener for data there and returns where that is, if there is one.
///
/// # Errors
/// When the port is taken, somebody does not come in time, the token, version or configuration is refused, or the wait is
/// interrupted.
pub fn join(
    mut options: JoinOptions,
    listen: impl FnOnce(SocketAddr) -> std::io::Result<Option<SocketAddr>>,
) -> Result<Control, ClusterError> {
    if options.config.len() > CONFIG_BYTES_MAX {
        return refused(format!("a configuration of more than {CONFIG_BYTES_MAX} bytes cannot be compared"));
    }
    let (rank, named) = (options.member.rank, options.member.data.clone());
    let cannot_listen = |error: std::io::Error| {
        let place = named.as_ref().map(|named| format!(" at {named}, as the cluster file says")).unwrap_or_default();
        ClusterError::Failed(format!("{rank} cannot listen for data{place}: {error}"))
    };
    if rank.index() == 0 {
        options.run = RunId::random();
        let listener = open(&options)?;
        let address = listener.local_addr().map_err(cannot_listen)?.ip();
        let data = listen(SocketAddr::new(address, 0)).map_err(cannot_listen)?;
        return Control::hub(options, listener, data);
    }
    let clock = Clock::real();
    let mut listen = Some(listen);
    let mut data = None;
    loop {
        let (stream, run) = knock(&options, &clock)?;
        if let Some(listen) = listen.take() {
            let address = stream.tcp().local_addr().map_err(cannot_listen)?.ip();
            data = data_place(&options.member, address).and_then(listen).map_err(cannot_listen)?;
        }
        // None: the hub left before the run began; somebody may start it again.
        let met = JoinOptions { run, ..options.clone() };
        if let Some(place) = introduce(&met, &clock, stream, data)? {
            return Control::spoke(met, place);
        }
    }
}

/// Where a member listens for data: at the address that it names, and otherwise on the one by which it has reached rank 0. So too where
/// its own name means only itself here, and it has come from elsewhere.
fn data_place(member: &Member, reached: IpAddr) -> std::io::Result<SocketAddr> {
    let Some(Address { host, port }) = &member.data else { return Ok(SocketAddr::new(reached, 0)) };
    let found = (host.as_str(), *port).to_socket_addrs()?.next();
    let found = found.ok_or_else(|| std::io::Error::other("the name has no address"))?;
    let only_here = found.ip().is_loopback() && !reached.is_loopback();
    Ok(if only_here { SocketAddr::new(reached, *port) } else { found })
}

/// Opens rank 0's port: on the address that the member's rendezvous names, or on all if that is loopback only although
/// members are on several machines.
fn open(options: &JoinOptions) -> Result<TcpListener, ClusterError> {
    let member = &options.member;
    let (host, port) = (&member.rendezvous.host, member.rendezvous.port);
    let address = match options.bind {
        Some(address) => SocketAddr::new(address, port),
        None => {
            let mut found = (host.as_str(), port).to_socket_addrs().map_err(|error| {
                ClusterError::Refused(format!("the host of rank 0, `{host}`, is not known here: {error}"))
            })?;
            let Some(address) = found.next() else {
                return refused(format!("the host of rank 0, `{host}`, has no address; type --bind ADDRESS"));
            };
            let own_name_is_loopback = address.ip().is_loopback() && !member.rendezvous.is_loopback();
            if own_name_is_loopback && member.spans_machines() {
                options
                    .log
                    .say(format!("`{host}` is {} here, which others cannot reach; listening on all", address.ip()));
                SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)
            } else {
                address
            }
        }
    };
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => ClusterError::Refused(format!(
            "port {port} of {} is taken; choose a free one with MASTER_PORT (or --port, or in the cluster file)",
            address.ip()
        )),
        ErrorKind::AddrNotAvailable => ClusterError::Refused(format!(
            "rank 0 is to listen on {} and this machine does not have that address; start rank 0 on `{host}`, or type \
             --bind with an address of this machine (0.0.0.0 for all)",
            address.ip()
        )),
        _ => ClusterError::Refused(format!("rank 0 cannot listen on {address}: {error}")),
    })?;
    options.log.say(format!("rank 0 listens on {address} for {} others, run {}", member.world - 1, options.run));
    Ok(listener)
}

/// Connects to rank 0 and greets, again and again until the deadline. Which run that is follows from its proven greeting.
fn knock(options: &JoinOptions, clock: &Clock) -> Result<(Socket, RunId), ClusterError> {
    let (member, limit, identity) = (&options.member, options.limits.gather, options.identity());
    let mut pause = Duration::from_millis(20);
    loop {
        options.interrupted()?;
        let left = limit.saturating_sub(clock.now());
        let attempt = connect(member, left).and_then(|stream| {
            let wait = Wait::new(left.min(Duration::from_secs(5)), &options.stop);
            let mut socket = Socket::dialled(stream, options.tls.as_ref()).map_err(|error| error.to_string())?;
            match greet(&mut socket, &identity, &wait) {
                Ok(peer) => Ok(Ok((socket, peer.run))),
                // A refusal is an answer: asking again would get the same.
                Err(error @ (CommError::Refused { .. } | CommError::RefusedBy { .. })) => Ok(Err(error)),
                Err(error) => Err(error.to_string()),
            }
        });
        let error = match attempt {
            Ok(Ok(met)) => return Ok(met),
            Ok(Err(refusal)) => return refused(refusal.to_string()),
            Err(error) => error,
        };
        if left.is_zero() {
            return Err(ClusterError::Failed(format!(
                "{} did not reach rank 0 at {} within {:.0} s: {error}",
                member.rank,
                member.rendezvous,
                limit.as_secs_f64()
            )));
        }
        clock::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn connect(member: &Member, left: Duration) -> Result<TcpStream, String> {
    let (host, port) = (member.rendezvous.host.as_str(), member.rendezvous.port);
    let addresses = (host, port).to_socket_addrs().map_err(|error| format!("`{host}` is not known here: {error}"))?;
    let mut last = "the name has no address".to_owned();
    for address in addresses {
        let limit = left.clamp(Duration::from_millis(1), Duration::from_secs(2));
        match TcpStream::connect_timeout(&address, limit) {
            // Linux can connect a port of the ephemeral range to itself when nobody listens there.
            Ok(stream) if stream.local_addr().is_ok_and(|own| own == address) => last = "nobody listens there".into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}

/// A rank's place in a run.
#[derive(Debug)]
pub(crate) struct Place {
    /// To rank 0.
    pub connection: Connection,
    /// All members.
    pub table: Table,
    /// How often this rank has come back.
    pub life: u16,
}

/// Says who this is and waits for the table; none if rank 0 went away meanwhile.
fn introduce(
    options: &JoinOptions,
    clock: &Clock,
    stream: Socket,
    data: Option<SocketAddr>,
) -> Result<Option<Place>, ClusterError> {
    let world = options.member.world;
    let hub = stream.tcp().peer_addr().map(|address| address.ip());
    let own = stream.tcp().local_addr().map(|address| address.ip());
    let connection = Connection::new(stream, Message::limit_at_spoke(world));
    let (Ok(hub), Ok(own), Ok(mut connection)) = (hub, own, connection) else { return Ok(None) };
    let mut entry = options.entry(data);
    entry.seen_from(own);
    let (config, run) = (options.config.clone(), options.run.to_string());
    let mut sent = connection.push(&Message::Join { entry, config, run }, clock.now());
    // Rank 0's own deadline comes first, and its verdict says more than this one could.
    let limit = options.limits.gather + options.limits.silent;
    while clock.now() < limit {
        options.interrupted()?;
        let message = sent.and_then(|()| connection.pull(world));
        match message {
            Ok(Some(Message::Table { mut entries, run, life })) => {
                if RunId::from_hex(&run) != Some(options.run) {
                    return refused(format!("rank 0 has the table of another run ({run}, and not {})", options.run));
                }
                entries[0].seen_from(hub);
                return Ok(Some(Place { connection, table: Table::new(entries), life }));
            }
            Ok(Some(Message::Refused { why })) => return refused(why),
            Ok(Some(Message::Ended { verdict })) => return Err(ClusterError::Ended(verdict)),
            Ok(Some(_)) => {}
            Ok(None) => drop(ready::wait(&[connection.interest()], Duration::from_millis(100))),
            Err(why) => {
                options.log.say(format!("rank 0 went away before the run began ({why}); trying again"));
                return Ok(None);
            }
        }
        sent = connection.flush(clock.now());
    }
    Err(ClusterError::Failed(format!(
        "rank 0 at {} did not say within {limit:?} that all are there",
        options.member.rendezvous
    )))
}
