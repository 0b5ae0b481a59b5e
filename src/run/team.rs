//! A process among others: starts them, meets them, and ends with them.

pub mod room;
mod secrecy;
mod stages;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use crate::cluster::launch::Output;
use crate::cluster::launch::group::{self, Ended, Start};
use crate::cluster::launch::{child, local, ssh};
use crate::cluster::speaker::{ends_with_the_first, shares_output, speaker};
use crate::cluster::spec::{ClusterFile, Hosts, PORT, Variables, from_environment};
use crate::cluster::{ClusterError, Control, Folder, Job, JoinOptions, Log, Member, Verdict, join};
use crate::cluster::{Limits as ClusterLimits, Progress};
use crate::comm::transport::{Membership, Transport, shm, tcp};
use crate::comm::{
    Algorithm, Choice, CommError, Communicator, Generation, Link, Links, Nodes, Options, Rank, Token, Wait, probe,
};
use crate::data::order::Shard;
use crate::parallel::agree::{self, Join, Roles};
use crate::parallel::mesh::{Axis, Extent, Mesh};
use crate::system::clock::Clock;
use crate::system::disk::Disk;
use crate::system::inbox::Inbox;
use crate::system::process;
use crate::system::shell::resume_line;
use crate::system::signal::Stop;
use crate::train::compute::Compute;
use crate::train::deadlines::Deadlines;
use crate::train::engine::guard::Limits;
use crate::train::serve::{ServerJournal, Serving, serve_parameters};
use crate::train::together::Carry;
use crate::train::trainer::{FolderBroadcast, RunFolder};
use crate::train::{Config, Registry, TrainError, Trainer};

use crate::arguments::Train;
use crate::command::Outcome;
use crate::command::restart;
use crate::failure::Failure;
use crate::terminal::Notes;
pub(super) use secrecy::secrecy;

/// The longest cluster file, certificate or key: a thousand addresses take 30 kB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What this process is.
pub enum Role {
    /// All there is; it may have several ranks.
    Alone,
    /// The one that starts the others.
    Launcher(Vec<Start>),
    /// One of several.
    Member(Box<Member>),
}

/// Finds out what this process is.
pub fn role(arguments: &Train, config: &Config, variables: &Variables) -> Result<Role, Failure> {
    if config.carry == Carry::MPI && !cfg!(feature = "mpi") {
        return Err(Failure::refused(
            "this paceline was built without MPI; with mpicc and libclang installed, type: cargo install --path . --features mpi",
        ));
    }
    if config.carry == Carry::THREAD && (arguments.cluster.is_some() || arguments.hosts.is_some()) {
        return Err(Failure::refused(
            "--carry thread keeps all ranks in one process of one machine; for several machines type --carry auto",
        ));
    }
    if let Some(file) = &arguments.cluster {
        return Ok(Role::Member(Box::new(from_file(file, arguments.job, arguments.task)?)));
    }
    let member = from_launcher(config, variables)?;
    check_threads(config, member.as_ref())?;
    if let Some(member) = member {
        return Ok(Role::Member(Box::new(member)));
    }
    if config.carry == Carry::MPI {
        let workers = config.workers.max(2);
        return Err(Failure::refused(format!(
            "--carry mpi is for processes that mpirun starts; type: mpirun -n {workers} paceline train --carry mpi …"
        )));
    }
    let here = config.ranks() < 2 || config.has_rank_threads();
    if arguments.hosts.is_none() && here && !restart::is_asked(arguments) {
        return Ok(Role::Alone);
    }
    Ok(Role::Launcher(starts(arguments, config, words(arguments, config))?))
}

/// What the processes of a launcher are started with: what this one was.
pub fn words(arguments: &Train, config: &Config) -> Vec<String> {
    let mut words = arguments.words();
    let is_told = arguments.workers.is_some() || arguments.replicas.is_some();
    if !is_told && arguments.resume.is_none() && arguments.hosts.is_none() {
        words.extend(["--workers".to_owned(), config.workers.to_string()]);
    }
    // What was found out here is told.
    if arguments.split.as_ref() != Some(&config.split) && config.stages() > 1 {
        words.extend(["--split".to_owned(), config.split.to_string()]);
    }
    words
}

/// The processes of a run, started with these words.
pub fn starts(arguments: &Train, config: &Config, words: Vec<String>) -> Result<Vec<Start>, Failure> {
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut starts = if let Some(hosts) = &arguments.hosts {
        let (hosts, folder) = (Hosts::parse(hosts)?, std::env::current_dir().map_err(Failure::failed)?);
        ssh::Ssh {
            hosts,
            port: arguments.port.unwrap_or(PORT),
            program,
            arguments: words,
            folder,
            ssh: vec!["ssh".into()],
        }
        .starts()?
    } else {
        let workers = if config.has_rank_threads() { 1 } else { config.ranks() };
        // Files that all processes would refuse are refused once.
        arguments.tls.as_deref().map(|files| secrecy(files, &Token::random())).transpose()?;
        local::Local { workers, program, arguments: words, pin: config.pin }.starts()?
    };
    starts[0].inherits = true;
    for start in &mut starts[1..] {
        start.arguments.retain(|word| word != "--json");
        if !arguments.quiet {
            start.arguments.push("--quiet".into());
        }
    }
    Ok(starts)
}

/// The member that a launcher says this process is, if there is one.
pub fn from_launcher(config: &Config, variables: &Variables) -> Result<Option<Member>, Failure> {
    let Some(member) = from_environment(variables)? else { return Ok(None) };
    Ok(Some(if member.world > 1 { member.with_servers(config.server_count())? } else { member }))
}

/// Refuses several processes of which each would have all ranks.
pub fn check_threads(config: &Config, member: Option<&Member>) -> Result<(), Failure> {
    let Some(member) = member.filter(|member| member.world > 1 && config.carry == Carry::THREAD) else { return Ok(()) };
    Err(Failure::refused(format!(
        "--carry thread and --replicas keep all ranks in one process, and by {} there are {}; \
         type --carry auto in their place, or start one process",
        member.source, member.world
    )))
}

/// The member of a cluster file that this process was told to be.
pub fn from_file(file: &Path, job: Option<Job>, task: Option<usize>) -> Result<Member, Failure> {
    let text = Disk::real().read_text_within(file, FILE_BYTES_MAX)?;
    let (Some(job), Some(task)) = (job, task) else {
        return Err(Failure::refused("--cluster needs to know which process this is; type --job worker --task 0"));
    };
    Ok(ClusterFile::parse(&text)?.member(job, task)?)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Starts the others and waits for them.
pub fn launch(starts: &[Start]) -> Outcome {
    launch_until(starts, &Stop::on_signals().map_err(Failure::failed)?)
}

/// As [`launch`], with what else may ask for the end.
pub fn launch_until(starts: &[Start], stop: &Stop) -> Outcome {
    let ended = group::run(starts, stop, &Output::to(std::io::stdout()), &Output::to(std::io::stderr()))?;
    Ok(exit_code(ended, stop))
}

/// What a launcher answers: of processes that were told to end and did so in good order, the signal.
pub fn exit_code(ended: Ended, stop: &Stop) -> ExitCode {
    match ended {
        Ended::Done => ExitCode::SUCCESS,
        Ended::Failed { refused, .. } => ExitCode::from(if refused { 2 } else { 1 }),
        Ended::Interrupted { in_order: true } => stop.signal().exit_code().into(),
        Ended::Interrupted { in_order: false } => ExitCode::FAILURE,
    }
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
    /// The run's secret, where this process has drawn it itself.
    pub token: Option<Token>,
    /// What ends the wait for the others, where it is more than the user's wish.
    pub interrupt: Option<Stop>,
    /// The models and data that can be named.
    pub registry: Registry,
}

/// Where the gradients of a run are added up, which follows from what all workers compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sums {
    /// Everybody computes on a CPU.
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
        let Deadlines { gather, late, silent, .. } = config.deadlines;
        options.limits = ClusterLimits::new(gather, late, silent);
        // So do the processes that a program has started itself.
        let shares_output = shares_output(&variables()) || arguments.token.is_some();
        let ends_with_the_first = ends_with_the_first(&variables()) && arguments.token.is_none();
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
        };
        let connected = team.connect(listener, token, config, sockets);
        let (mut communicator, urgent) = team.guard(connected.map_err(TrainError::from))?;
        let sums = team.compare_devices(&mut communicator, config);
        team.sums.set(team.guard(sums)?);
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
        let by_memory = matches!(config.carry, Carry::SHM | Carry::THREAD)
            || (matches!(config.carry, Carry::AUTO | Carry::NCCL) && one_machine);
        // The sums of batch-norms are waited for, and come at other points of a step on other devices: they do not travel behind
        // gradients.
        let apart = config.sync_batch_norm;
        let transport = match listener {
            #[cfg(feature = "mpi")]
            _ if config.carry == Carry::MPI => {
                Transport::Mpi(Box::new(super::mpi::connect(&membership, self.control.stop())?))
            }
            Some(listener) if !by_memory => {
                let addresses: Vec<SocketAddr> = table.entries().iter().filter_map(|entry| entry.data).collect();
                sockets.groups += u16::from(apart) + self.groups();
                Transport::Tcp(tcp::connect(listener, &addresses, &membership, sockets, &wait)?)
            }
            _ => Transport::Shm(shm::connect(&membership, &wait)?),
        };
        let nodes = Nodes::new(table.nodes().iter().map(|&node| node as u32).collect());
        let (timeout, stop) = (self.deadlines.message, self.control.stop().clone());
        let options = Options { timeout, stop, choice: guess(nodes.clone()) };
        let mut communicator = Communicator::new(transport, options);
        let algorithm = config.algorithm.as_deref().and_then(Algorithm::from_name);
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
            _ if gpus == 0 => Sums::Cpu,
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
        let serving = Serving {
            journal,
            recipe: config.agree.recipe(),
            options: config.agreement(false),
            roles: self.roles(),
            communicator: self.communicator.take().expect("a team has met"),
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
        let join = Join {
            communicator,
            urgent: self.urgent.take(),
            roles: self.roles(),
            shape: &shape,
            options,
            deadline: self.deadlines.message,
            clock: Clock::real(),
        };
        let agreement = config.agree.recipe().join(join).map_err(TrainError::from);
        self.guard(agreement.and_then(|agreement| trainer.agree(agreement)))
    }

    /// Tells everybody of an error, and hears whose it is.
    pub fn guard<T>(&self, result: Result<T, TrainError>) -> Result<T, Failure> {
        self.judge(result).inspect_err(|_| self.let_others_speak())
    }

    /// Where a launcher kills all processes as soon as one has failed, those that say nothing wait for the one that does.
    fn let_others_speak(&self) {
        match self.member.rank {
            _ if !self.ends_with_the_first => {}
            Rank(0) => self.control.stay_open(),
            _ if self.speaks_at_the_end() => {}
            _ => self.control.outlast_rank_0(self.deadlines.farewell),
        }
    }

    fn judge<T>(&self, result: Result<T, TrainError>) -> Result<T, Failure> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let suspect = if let TrainError::Comm(error) = &error { error.peer() } else { None };
        let in_vain = error.is_in_vain();
        let verdict = self.control.give_up(&error.to_string(), suspect, in_vain);
        let failure = match (&error, &verdict) {
            (TrainError::Comm(_), Some(verdict)) => Failure::failed(verdict).in_vain(verdict.is_in_vain()),
            _ => error.into(),
        };
        let rank = self.shares_output.then_some(self.member.rank);
        let failure = failure.for_all(self.speaks_at_the_end());
        Err(if is_told_elsewhere(verdict.as_ref(), rank) { failure.silently() } else { failure })
    }

    /// Tells everybody why a run fails, and hears whose fault it is. Where another rank was lost, rank 0 saves the last whole step, or
    /// rank 1 if rank 0 is the one.
    pub fn fail(&self, error: TrainError, trainer: &mut Trainer) -> Failure {
        let failure = self.save_after(error, trainer);
        self.let_others_speak();
        failure
    }

    fn save_after(&self, error: TrainError, trainer: &mut Trainer) -> Failure {
        let of_another = matches!(error, TrainError::Comm(_));
        let failure = match self.judge(Err::<(), _>(error)) {
            Ok(()) => return Failure::failed("the run has failed"),
            Err(failure) => failure,
        };
        let Some(verdict) = self.control.verdict().filter(|verdict| verdict.rank != self.member.rank.index()) else {
            return failure;
        };
        let lowest = usize::from(verdict.rank == 0);
        if !of_another || self.member.rank.index() != lowest {
            return failure;
        }
        let line = resume_line(trainer.run_dir().path());
        failure.and(&match trainer.save_after_loss() {
            Ok(Ok(step)) => format!("; step {step} is saved; to go on from there, type: {line}"),
            Ok(Err(why)) => {
                let last = trainer.last_checkpoint();
                format!("; nothing was saved, because {why}. {last}; to go on, type: {line}")
            }
            Err(error) => format!("; {error}"),
        })
    }

    /// Whether this is the process that speaks for a run that has failed: the first of those that are left.
    pub fn speaks_at_the_end(&self) -> bool {
        self.member.rank == self.control.verdict().map_or(Rank(0), |verdict| speaker(&verdict))
    }

    /// Ends together with the others.
    pub fn finish(self) -> Result<(), Failure> {
        // Only whoever tells of the folder borrows it, and that is long over.
        let control = Arc::into_inner(self.control).ok_or_else(|| Failure::failed("the run is still being told of"))?;
        let rank = self.shares_output.then_some(self.member.rank);
        control.finish(self.deadlines.farewell).map_err(|error| once(error, rank))
    }
}

/// How long GPUs may wait for each other: to meet (connections of many take a while), and in a step, as any message.
pub fn gpu_limits(deadlines: &Deadlines, stop: &crate::comm::Stop) -> Limits {
    Limits { stop: stop.clone(), meeting: 2 * deadlines.connect, step: deadlines.message }
}

/// Whether another rank tells the user of a verdict; `rank` is this one, where all share their output.
fn is_told_elsewhere(verdict: Option<&Verdict>, rank: Option<Rank>) -> bool {
    verdict.zip(rank).is_some_and(|(verdict, rank)| speaker(verdict) != rank)
}

/// A failure to meet or to part, told by one rank.
fn once(error: ClusterError, rank: Option<Rank>) -> Failure {
    let elsewhere = matches!(&error, ClusterError::Ended(verdict) if is_told_elsewhere(Some(verdict), rank));
    if elsewhere { Failure::from(error).silently() } else { error.into() }
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
