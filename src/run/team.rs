//! A process among others: starts them, meets them, and ends with them.

mod boxes;
mod ending;
mod groups;
mod portions;
mod role;
pub mod room;
mod secrecy;
mod stages;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use crate::cluster::launch::child;
use crate::cluster::speaker::{ends_with_the_first, shares_output};
use crate::cluster::spec::Variables;
use crate::cluster::{ClusterError, Control, Folder, JoinOptions, Log, Member, join};
use crate::cluster::{Limits as ClusterLimits, Progress};
use crate::comm::memory_box::Lending;
use crate::comm::transport::{Membership, Transport, shm, tcp};
use crate::comm::{
    Algorithm, Choice, CommError, Communicator, Generation, Link, Links, Nodes, Options, Rank, Token, Wait, probe,
};
use crate::data::order::Shard;
use crate::parallel::agree::{self, Join, Roles};
use crate::parallel::lock_free::ThreadMemory;
use crate::parallel::mesh::{Axis, Extent, Mesh};
use crate::system::clock::Clock;
use crate::system::disk::Disk;
use crate::system::inbox::Inbox;
use crate::system::process;
use crate::system::signal::Stop;
use crate::train::compute::Compute;
use crate::train::deadlines::Deadlines;
use crate::train::engine::guard::Limits;
use crate::train::serve::{ServerJournal, Serving, serve_parameters};
use crate::train::together::Carry;
use crate::train::trainer::{FolderBroadcast, RunFolder};
use crate::train::{Config, Registry, TrainError, Trainer};

use crate::command::Outcome;
use crate::failure::Failure;
use crate::terminal::Notes;
use ending::once;
pub use role::{Role, check_threads, exit_code, from_file, from_launcher, launch, launch_until, role, starts, words};
pub(super) use secrecy::secrecy;

/// The longest cluster file, certificate or key: a thousand addresses take 30 kB.
const FILE_BYTES_MAX: u64 = 1 << 20;

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// This process's environment.
pub fn variables() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect::<BTreeMap<_, _>>()
}

/// A place among others that have all arrived.
pub struct Team {
    member: Member,
    /// Who computes what.
    mesh: Mesh,
    control: Arc<Control>,
    communicator: Cell<Option<Communicator>>,
    /// For what cannot wait behind gradients, where that is of use.
    urgent: Cell<Option<Communicator>>,
    /// Where gradients are added up.
    sums: Cell<Sums>,
    deadlines: Deadlines,
    /// What the control thread says, on the terminal and for the event log.
    notes: Notes,
    inbox: Inbox,
    /// Whether all ranks write to where this one does.
    shares_output: bool,
    /// Whether a launcher kills all of them as soon as one has failed.
    ends_with_the_first: bool,
    /// The models that can be named.
    registry: Registry,
    /// What all ranks share where they are threads of one process.
    memory: Option<ThreadMemory>,
    /// Where memory boxes are, for agreements that use them.
    lending: Option<Lending>,
}

/// How a process meets the others.
#[derive(Clone, Debug, Default)]
pub struct Meeting {
    /// Whether rank 0 says nothing of what happens meanwhile.
    pub quiet: bool,
    /// The address that rank 0 listens on, where it should not follow from the member.
    pub bind: Option<IpAddr>,
    /// Files for certificates, or no name for keys that follow from the token.
    pub tls: Option<String>,
    /// The run's secret, where this process has drawn it itself or knows it from a meeting before.
    pub token: Option<Token>,
    /// Whether this process has started the others itself.
    pub starts_others: bool,
    /// What ends the wait for the others, where it is more than the user's wish.
    pub interrupt: Option<Stop>,
    /// The models and data that can be named.
    pub registry: Registry,
    /// What all ranks share where they are threads of one process.
    pub memory: Option<ThreadMemory>,
}

/// Where the gradients of a run are added up, which follows from what all workers compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sums {
    /// Everybody computes on a CPU, or keeps them.
    #[default]
    Cpu,
    /// Some compute on GPUs, whose gradients pass through the hosts' memory.
    Hosted,
    /// Everybody computes on a GPU, and they add up among themselves.
    Devices,
}

impl Team {
    /// Meets the others and connects to them.
    pub fn meet(member: Member, arguments: &Meeting, config: &Config, stop: &Stop) -> Result<Self, Failure> {
        let token = arguments.token.clone().map_or_else(|| child::begin(&variables(), stop), Ok)?;
        let quiet = arguments.quiet;
        let rank = member.rank;
        let mut options = JoinOptions::new(
            member.clone(),
            token.clone(),
            fingerprint(config) + &arguments.registry.fingerprint(&config.data),
        );
        options.interrupt = arguments.interrupt.as_ref().unwrap_or(stop).clone();
        options.bind = arguments.bind;
        options.group = config.group();
        options.tls = arguments.tls.as_deref().map(|files| secrecy(files, &token)).transpose()?;
        let (notes, inbox) = (Notes::default(), Inbox::default());
        options.log = Log::new({
            let (notes, inbox) = (notes.clone(), inbox.clone());
            move |notice| {
                notice.event.into_iter().for_each(|event| inbox.push(event));
                if notice.warning && !(quiet && rank.0 == 0) {
                    notes.say(&notice.text);
                }
            }
        });
        options.keeps_door = config.goes_on_without_workers();
        let Deadlines { gather, late, silent, .. } = config.deadlines;
        options.limits = ClusterLimits::new(gather, late, silent);
        // So do the processes that a program has started itself.
        let shares_output = shares_output(&variables()) || arguments.starts_others;
        let ends_with_the_first = ends_with_the_first(&variables()) && !arguments.starts_others;
        let (sockets, report) = (config.sockets as u16, tcp::Report::new(options.log.refusals()));
        let sockets = tcp::Config { sockets, tls: options.tls.clone(), report, ..tcp::Config::default() };
        let arrived = arrive(options).map_err(|error| once(error, shares_output.then_some(rank)));
        let (control, listener) = arrived?;
        let control = Arc::new(control);
        let (communicator, urgent) = (Cell::new(None), Cell::new(None));
        let (stages, parts, servers) = (config.stages(), config.parts(), member.servers);
        let workers = member.workers() / config.ranks_per_worker();
        let mesh = Mesh::new(Extent { workers, stages, parts, servers }, control.table().nodes());
        let (sums, deadlines, registry) = (Cell::new(Sums::Cpu), config.deadlines, arguments.registry.clone());
        let memory = arguments.memory.clone();
        let lending = boxes::lending(config, arguments.tls.as_deref(), (&control, member.rank), (&token, &sockets.tls));
        let lending = lending?;
        let team = Self {
            member,
            mesh,
            control,
            communicator,
            urgent,
            sums,
            deadlines,
            notes,
            inbox,
            shares_output,
            ends_with_the_first,
            registry,
            memory,
            lending,
        };
        let connected = team.connect(listener, token, config, sockets);
        let (mut communicator, urgent) = team.guard(connected.map_err(TrainError::from))?;
        // Where a rank may come back, all compute on CPUs.
        if !team.is_back() {
            let sums = team.compare_devices(&mut communicator, config);
            team.sums.set(team.guard(sums)?);
        }
        team.communicator.set(Some(communicator));
        team.urgent.set(urgent);
        Ok(team)
    }

    fn connect(
        &self,
        listener: Option<tcp::Listener>,
        token: Token,
        config: &Config,
        mut sockets: tcp::Config,
    ) -> Result<(Communicator, Option<Communicator>), CommError> {
        let (rank, world, table) = (self.member.rank, self.member.world, self.control.table());
        let one_machine = table.nodes().iter().all(|&node| node == 0);
        let membership = Membership { token, run: self.control.run(), rank, world, generation: Generation::default() };
        let wait = Wait::new(self.deadlines.connect, self.control.stop());
        let by_memory = config.keeps_one_process()
            || config.carry == Carry::SHM
            || (matches!(config.carry, Carry::AUTO | Carry::NCCL) && one_machine);
        // The sums of batch-norms are waited for, and come at other points of a step on other devices: they do not travel behind
        // gradients. Nor do fragments of weights wait for anything else.
        let apart = config.sync_batch_norm || config.fragments.is_some_and(|fragments| fragments > 1);
        let transport = match listener {
            #[cfg(feature = "mpi")]
            _ if config.carry == Carry::MPI => {
                Transport::Mpi(Box::new(super::mpi::connect(&membership, self.control.stop())?))
            }
            Some(listener) if !by_memory => {
                let addresses: Vec<SocketAddr> = table.entries().iter().filter_map(|entry| entry.data).collect();
                sockets.groups += u16::from(apart) + self.groups() + groups::sockets(config);
                sockets.keeps_listening = self.serves() && config.lets_workers_return().is_ok();
                let life = tcp::Life { number: self.control.life(), peers: self.mesh.extent().computing()..world };
                Transport::Tcp(match life.number {
                    0 => tcp::connect(listener, &addresses, &membership, sockets, &wait)?,
                    _ => tcp::rejoin(listener, &addresses, &membership, sockets, (life, &wait))?,
                })
            }
            _ => Transport::Shm(shm::connect(&membership, &wait)?),
        };
        let nodes = Nodes::new(table.nodes().iter().map(|&node| node as u32).collect());
        let (timeout, stop) = (self.deadlines.message, self.control.stop().clone());
        let options = Options { timeout, stop, choice: guess(nodes.clone()) };
        let mut communicator = Communicator::new(transport, options);
        let algorithm = config.algorithm.as_deref().and_then(Algorithm::from_name);
        // Nobody measures links with one that comes later.
        if self.is_back() {
            return Ok((communicator, None));
        }
        let links = probe::links(&mut communicator, nodes)?;
        communicator.set_choice(Choice::by_cost(links).forced(algorithm));
        let all = if self.is_split() { self.mesh.group(Axis::Data, rank) } else { (0..world).map(Rank::at).collect() };
        let urgent = apart.then(|| communicator.group(&all)).transpose()?;
        Ok((communicator, urgent))
    }

    /// What all workers compute on, and so where gradients are added up: all ranks come to the same answer.
    fn compare_devices(&self, communicator: &mut Communicator, config: &Config) -> Result<Sums, TrainError> {
        let on_gpu = config.device != Compute::Cpu && !self.serves();
        let mut counts = [on_gpu, on_gpu && config.sums_on_devices()].map(|is| f32::from(u8::from(is)));
        communicator.all_reduce(&mut counts)?;
        let ([gpus, among_themselves], workers) = (counts.map(|count| count as usize), self.mesh.extent().computing());
        if config.carry == Carry::NCCL && among_themselves < workers {
            return Err(TrainError::Refused(format!(
                "--carry nccl is for GPUs, and {gpus} of {workers} workers compute on one; type --device cuda on all, or leave --carry out"
            )));
        }
        Ok(match workers {
            _ if gpus == 0 || !config.gradients_leave() => Sums::Cpu,
            _ if self.is_split() => Sums::Hosted,
            workers if among_themselves == workers => Sums::Devices,
            _ => Sums::Hosted,
        })
    }

    /// Whether gradients of GPUs pass through the hosts' memory.
    pub fn is_hosted(&self) -> bool {
        self.sums.get() == Sums::Hosted
    }

    /// Whether all ranks map the same memory.
    pub fn shares_memory(&self) -> bool {
        let communicator = self.communicator.take();
        let shares = communicator.as_ref().is_some_and(Communicator::shares_memory);
        self.communicator.set(communicator);
        shares
    }

    /// The rank and world of those that compute.
    pub fn shard(&self) -> Shard {
        let world = self.mesh.extent().workers;
        let rank = self.mesh.coordinates(self.member.rank).map_or(world - 1, |coordinates| coordinates.data);
        Shard { rank, world }
    }

    /// Whether this process holds parameters instead of computing.
    pub fn serves(&self) -> bool {
        self.mesh.coordinates(self.member.rank).is_none()
    }

    /// Whether this process tells the user about the run.
    pub fn speaks(&self) -> bool {
        self.member.rank == Rank(0)
    }

    /// This process's place among those of its machine.
    pub fn local(&self) -> Shard {
        let local = self.control.table().local(self.member.rank);
        Shard { rank: local.rank, world: local.world }
    }

    /// Says in heartbeats how far this process is.
    pub fn progress(&self) -> Progress {
        self.control.progress().clone()
    }

    /// What the control thread tells for the event log.
    pub fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// Where the control thread says something to people.
    pub fn notes(&self) -> Notes {
        self.notes.clone()
    }

    /// Tells all workers where rank 0 has made the run's folder.
    pub fn folder(&self) -> FolderBroadcast {
        let (control, rank, limit) = (Arc::downgrade(&self.control), self.member.rank, self.deadlines.message);
        let stopped = move |reason: String| CommError::Stopped { rank, phase: "begin", reason };
        FolderBroadcast::new(move |own| {
            let control = control.upgrade().ok_or_else(|| stopped("the run is over".into()))?;
            let Some(own) = own else {
                let told = control.folder(limit).map_err(|error| stopped(error.to_string()))?;
                return Ok(RunFolder { path: PathBuf::from(told.path), id: told.id });
            };
            let path = absolute(&own.path);
            let Some(text) = path.to_str() else {
                let sentence = "has a name that is no UTF-8 and cannot be told to other ranks; type another --run";
                return Err(TrainError::Refused(format!("{} {sentence}", path.display())));
            };
            control.send_folder(Folder { path: text.to_owned(), id: own.id.clone() });
            Ok(own.clone())
        })
    }

    /// What each rank says, behind each other: all say equally much.
    pub fn gather(&self, own: &[f32]) -> Result<Vec<f32>, Failure> {
        let mut communicator = self.communicator.take().expect("a team has met");
        let mut all = vec![0.0; own.len() * communicator.world()];
        let place = communicator.own_chunk(all.len());
        all[place].copy_from_slice(own);
        let gathered = communicator.all_gather(&mut all).map_err(TrainError::from);
        self.communicator.set(Some(communicator));
        self.guard(gathered)?;
        Ok(all)
    }

    /// Seconds that an all-reduce of so many numbers takes, and those of this process's cores: the lesser of two, behind one that opens
    /// windows.
    pub fn rehearse_sum(&self, elements: usize) -> Result<(f64, f64), Failure> {
        let mut communicator = self.communicator.take().expect("a team has met");
        let mut numbers = vec![0.0; elements];
        let mut turn = || {
            communicator.barrier()?;
            let (clock, cpu_s) = (Clock::real(), process::cpu_seconds());
            communicator.all_reduce(&mut numbers)?;
            Ok((clock.seconds(), process::cpu_seconds() - cpu_s))
        };
        let turns = turn().and_then(|_| Ok([turn()?, turn()?])).map_err(|error: CommError| TrainError::from(error));
        self.communicator.set(Some(communicator));
        let [one, other] = self.guard(turns)?;
        Ok((one.0.min(other.0), one.1.min(other.1)))
    }

    /// What was measured of the links when the ranks met.
    pub fn links(&self) -> Links {
        let communicator = self.communicator.take().expect("a team has met");
        let links = communicator.choice().links().clone();
        self.communicator.set(Some(communicator));
        links
    }

    /// The machine of each rank.
    pub fn hosts(&self) -> Vec<String> {
        self.control.table().entries().iter().map(|entry| entry.host.clone()).collect()
    }

    /// Serves parameters until all workers have ended.
    pub fn serve(self, config: &Config) -> Outcome {
        let journal = self.guard(self.server_journal(config))?;
        let grouped = self.group(config, self.communicator.take().expect("a team has met"))?;
        let serving = Serving {
            journal,
            recipe: config.agree.recipe(),
            options: config.agreement(false),
            roles: grouped.roles,
            communicator: grouped.communicator,
            lending: self.lending.clone(),
            deadline: self.deadlines.message,
            clock: Clock::real(),
        };
        self.guard(serve_parameters(config, &self.registry, serving, self.is_hosted()))?;
        self.finish()?;
        Ok(ExitCode::SUCCESS)
    }

    /// What a server tells: in heartbeats, and in an event file of its own.
    fn server_journal(&self, config: &Config) -> Result<ServerJournal, TrainError> {
        let Some(folder) = self.folder().receive()? else { return Ok(ServerJournal::new(self.control.progress())) };
        let control = Arc::downgrade(&self.control);
        let waited = move || control.upgrade().map(|control| control.waited()).unwrap_or_default();
        let journal = ServerJournal::new(self.control.progress());
        journal.write_to((&Disk::real(), &folder), self.member.rank.0, config, waited)
    }

    fn roles(&self) -> Roles {
        let Extent { workers, servers, .. } = self.mesh.extent();
        Roles { workers, servers }
    }

    /// Makes a trainer one of the workers.
    pub fn join(&self, trainer: &mut Trainer) -> Result<(), Failure> {
        let (mut shape, config) = (trainer.replica().shape(), trainer.config().clone());
        let mut communicator = self.communicator.take().expect("a team has met");
        if self.sums.get() == Sums::Devices {
            let hosts = self.hosts();
            let limits = gpu_limits(&self.deadlines, self.control.stop());
            self.guard(trainer.join_gpus(Some(&mut communicator), &hosts, &limits))?;
            // Gradients stay on the GPUs; what else ranks tell each other goes the usual way.
            shape.buckets.clear();
        }
        if self.is_split() {
            communicator = self.join_siblings(trainer, communicator)?;
            if self.mesh.extent().workers == 1 {
                return Ok(());
            }
        }
        let replica = trainer.replica();
        let whole = config.keeps_messages_whole() && !replica.has_shard();
        let one_copy = whole && self.sums.get() == Sums::Cpu && replica.engine.steps_by_elements();
        let options = agree::Options { shard: replica.has_shard(), ..config.agreement(one_copy) };
        let grouped = self.group(&config, communicator)?;
        let join = Join {
            communicator: grouped.communicator,
            urgent: self.urgent.take(),
            group: grouped.group,
            memory: self.memory.clone(),
            lending: self.lending.clone(),
            roles: grouped.roles,
            shape: &shape,
            options,
            deadline: self.deadlines.message,
            clock: Clock::real(),
        };
        let agreement = config.agree.recipe().join(join).map_err(TrainError::from);
        self.guard(agreement.and_then(|agreement| match self.is_back() {
            true => trainer.agree_again(agreement),
            false => trainer.agree(agreement),
        }))?;
        self.go_on_without_workers(&config);
        Ok(())
    }
}

/// How long GPUs may wait for each other: to meet (connections of many take a while), and in a step, as any message.
pub fn gpu_limits(deadlines: &Deadlines, stop: &crate::comm::Stop) -> Limits {
    Limits { stop: stop.clone(), meeting: 2 * deadlines.connect, step: deadlines.message }
}

/// Meets the others, with a listener for data where they can reach this process.
pub fn arrive(options: JoinOptions) -> Result<(Control, Option<tcp::Listener>), ClusterError> {
    let rank = options.member.rank;
    let mut listener = None;
    let control = join(options, |address: SocketAddr| -> std::io::Result<Option<SocketAddr>> {
        let opened = tcp::Listener::at(rank, address).map_err(std::io::Error::other)?;
        let address = opened.address();
        listener = Some(opened);
        Ok(Some(address))
    })?;
    Ok((control, listener))
}

/// How algorithms are chosen before any link is measured.
pub fn guess(nodes: Nodes) -> Choice {
    let link = Link::new(20e-6, 2e9);
    Choice::by_cost(Links { nodes, within: link, between: link })
}

/// What all ranks must agree on, as lines; how many threads each has is its own affair.
fn fingerprint(config: &Config) -> String {
    // What each computes on is its own affair too; then NCCL is no other way than the usual one.
    let carry = if config.carry == Carry::NCCL { Carry::AUTO } else { config.carry };
    Config { threads: None, loader_threads: 1, weights: None, device: Compute::Cpu, carry, ..config.clone() }.to_toml()
}
