//! From a configuration to something that can be trained: opens the data, fits the model to it, builds the replica.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_data::augment::Augment;
use paceline_data::dataset::{Dataset, Info, OpenOptions};
use paceline_data::far::Elsewhere;
use paceline_data::loader::{Loader, LoaderOptions};
use paceline_data::order::Shard;
use paceline_nn::weights::WeightsError;
use paceline_nn::{Input, Mode, Model, Network};
use paceline_system::clock::Clock;
use paceline_system::disk::Disk;
use paceline_system::inbox::Inbox;
use paceline_system::limits::Limits;
use paceline_system::progress::Progress;
use paceline_system::signal::Stop;
use paceline_system::threads;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::kept::Kept;
use paceline_tensor::device::cuda::session::Album;
use paceline_tensor::device::cuda::{self, Cuda, CudaError, Options};
use paceline_tensor::part::Form;

use super::gathered::check_length;
use crate::checkpoint::{Card, CheckedWeights, find_weights};
use crate::compute::Compute;
use crate::config::Config;
use crate::engine::{Albums, Place};
use crate::error::TrainError;
use crate::gpus;
use crate::micro_batch::MicroBatchSizes;
use crate::portions::PortionCounter;
use crate::registry::Registry;
use crate::rehearsal::Rehearsal;
use crate::replica::{Replica, ReplicaOptions};
use crate::room::{Candidate, Processes};
use crate::sizing::{self, Sizing};
use crate::stage::ModelStage;
use crate::together::{Overlap, PartSplit, Split};

/// What is said where the optimizer's state is to be divided, and is there once.
const ONE_COPY: &str = "all workers map one copy of the weights and of the optimizer's state, which is less than a part \
                        for each would be: --shard optimizer changes nothing here";

/// The world around a run.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Files.
    pub disk: Disk,
    /// Time, starting when the process did.
    pub clock: Clock,
    /// Ctrl-C.
    pub stop: Stop,
    /// The folder in which data sets are looked for when a spec names none.
    pub data_home: Option<PathBuf>,
    /// How data on other machines are reached.
    pub elsewhere: Elsewhere,
    /// Which rank of how many this process is.
    pub shard: Shard,
    /// Which stage of how many of its worker's model this process computes.
    pub stage: Shard,
    /// Which part of how many of its worker's layers this process computes.
    pub part: Shard,
    /// Which process of how many it is on its machine.
    pub local: Shard,
    /// Says how far the run is; heartbeats read it.
    pub progress: Progress,
    /// What other threads tell for the event log.
    pub inbox: Inbox,
    /// How all ranks come to know the folder that rank 0 has made for the run.
    pub folder: FolderBroadcast,
    /// Who hands out portions of the data, where workers do not wait for each other.
    pub portions: PortionCounter,
    /// The folder in which it is kept what was found out about this machine's devices.
    pub cache: Option<PathBuf>,
    /// Whether gradients of GPUs pass through the hosts' memory: then all devices send the same buckets.
    pub hosted: bool,
    /// Whether all ranks map the same memory.
    pub shares_memory: bool,
    /// The models and data that can be named.
    pub registry: Registry,
    /// How often a launcher has started the run again by itself.
    pub restarts: Restarts,
    /// How long a run goes on that is made to be timed.
    pub rehearsal: Option<Rehearsal>,
}

/// Of a run that its launcher starts again after failures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Restarts {
    /// How often it did.
    pub number: u64,
    /// How often it may.
    pub most: u64,
    /// How long the processes before took: a limit on time counts them.
    pub spent_s: f64,
}

impl Default for Surroundings {
    fn default() -> Self {
        Self {
            disk: Disk::real(),
            clock: Clock::real(),
            stop: Stop::new(),
            data_home: None,
            elsewhere: Elsewhere::default(),
            shard: Shard::WHOLE,
            stage: Shard::WHOLE,
            part: Shard::WHOLE,
            local: Shard::WHOLE,
            progress: Progress::default(),
            inbox: Inbox::default(),
            folder: FolderBroadcast::default(),
            portions: PortionCounter::default(),
            cache: None,
            hosted: false,
            shares_memory: false,
            registry: Registry::default(),
            restarts: Restarts::default(),
            rehearsal: None,
        }
    }
}

impl Surroundings {
    /// This process's number among all that compute.
    pub const fn rank(&self) -> usize {
        (self.shard.rank * self.stage.world + self.stage.rank) * self.part.world + self.part.rank
    }
}

/// Where a run is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder {
    /// The folder.
    pub path: PathBuf,
    /// What its checkpoints are marked with.
    pub id: String,
}

type CarryFolder = dyn Fn(Option<&RunFolder>) -> Result<RunFolder, TrainError> + Send + Sync;

/// Rank 0 makes the folder of a run, and only then tells the others where it is: nobody writes into it before, and no two
/// ranks can name it differently.
#[derive(Clone, Default)]
pub struct FolderBroadcast(Option<Arc<CarryFolder>>);

impl FolderBroadcast {
    /// One that calls `carry` with the folder on rank 0, which tells it, and with nothing on the others, which wait for it.
    pub fn new(carry: impl Fn(Option<&RunFolder>) -> Result<RunFolder, TrainError> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(carry)))
    }

    /// Rank 0: tells the others.
    ///
    /// # Errors
    /// When its name cannot be told.
    pub fn send(&self, folder: &RunFolder) -> Result<(), TrainError> {
        self.0.as_ref().map_or(Ok(()), |carry| carry(Some(folder)).map(drop))
    }

    /// The others: waits for it. None if nobody tells.
    ///
    /// # Errors
    /// When the run ends before.
    pub fn receive(&self) -> Result<Option<RunFolder>, TrainError> {
        self.0.as_ref().map(|carry| carry(None)).transpose()
    }
}

impl std::fmt::Debug for FolderBroadcast {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FolderBroadcast")
    }
}

/// A model and its data, ready for the first step.
#[derive(Debug)]
pub struct Prepared {
    /// The model.
    pub replica: Replica,
    /// Training batches.
    pub train: Loader,
    /// Validation batches.
    pub val: Loader,
    /// What a checkpoint says of itself.
    pub card: Card,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Prepares a model that is known by name: one of the zoo, or one of `around.registry`.
///
/// # Errors
/// When anything asked for cannot work; the sentence says what to type.
pub fn prepare(config: &Config, around: &Surroundings) -> Result<Prepared, TrainError> {
    config.check()?;
    config.check_world(around.shard.world)?;
    let model = around.registry.find_model(&config.model)?;
    let (train, val) = open(config, around)?;
    let sizing = sizing::fit(&model, train.info(), config.size)?;
    assemble(&model, config, around, (train, val), sizing)
}

/// Prepares a model of one's own for the data's samples as they are, or resized to `config.size`.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_with(model: &dyn Model, config: &Config, around: &Surroundings) -> Result<Prepared, TrainError> {
    config.check()?;
    config.check_world(around.shard.world)?;
    let (train, val) = open(config, around)?;
    let sizing = sizing::as_they_are(train.info(), config.size);
    assemble(model, config, around, (train, val), sizing)
}

/// A trained model and a validation set, without anything that only training needs.
#[derive(Debug)]
pub struct Examined {
    /// The model, with the weights of the file.
    pub replica: Replica,
    /// Validation batches.
    pub val: Loader,
}

/// Prepares an evaluation: the model that `weights` describes, on the validation half of `data`.
///
/// # Errors
/// When the data has other classes than the model was trained for, or other samples.
pub fn prepare_evaluation(weights: &Path, config: &Config, around: &Surroundings) -> Result<Examined, TrainError> {
    let file = CheckedWeights::open(&around.disk, weights)?;
    let card = file.card()?;
    let model = around.registry.find_model(&card.model)?;
    if card.model != config.model {
        return Err(TrainError::Refused(format!(
            "{} holds weights of {}, and the run's config.toml names {}; type a run whose files belong together",
            weights.display(),
            card.model,
            config.model
        )));
    }
    let (_, val) = open(config, around)?;
    let found = &val.info().class_names;
    if *found != card.class_names {
        let differ = found.iter().zip(&card.class_names).find(|(here, there)| here != there);
        let differ = differ.map_or_else(
            || format!("{} classes instead of {}", found.len(), card.class_names.len()),
            |(here, there)| format!("`{here}` where it learned `{there}`"),
        );
        let (data, model) = (&config.data, &card.model);
        return Err(TrainError::Refused(format!(
            "{data} has {differ}, so its answers would mean nothing for this {model}; type --data with the classes it was trained on"
        )));
    }
    let input = card.input()?;
    let evaluation = match input {
        Input::Image { .. } => Augment::new(card.preprocess.clone())?,
        Input::Tokens { .. } => Augment::evaluation(config.augment, val.info(), None)?,
    };
    let micro_batch = config.micro_batch();
    let (threads, deadline) = (config.loader_threads, config.deadlines.batch);
    let options = LoaderOptions { threads, deadline, ..LoaderOptions::evaluation(micro_batch) };
    let val = Loader::new(Arc::new(val), evaluation, options, around.clock.clone())?;
    let rule =
        config.optimizer.rule(&config.hyper_parameters).map_err(|error| TrainError::Refused(error.to_string()))?;
    let options = ReplicaOptions {
        input,
        classes: card.class_names.len(),
        micro_batch,
        other_sizes: Default::default(),
        accumulate: 1,
        smoothing: 0.0,
        seed: config.seed,
        rule,
        precision: config.dtype,
        memory: config.memory,
        clip_norm: None,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        shard: None,
        slots: 0,
    };
    let cpu = Arc::new(Cpu::placed(config.compute_threads(), config.pin));
    cpu.allow_winograd(config.winograd);
    let place = match open_gpu(config, around)? {
        Some(gpu) => Place::Cuda(cpu, gpu.cuda),
        None => Place::Cpu(cpu),
    };
    let mut replica = Replica::for_evaluation(&model, options, &place)?;
    file.load(&mut replica, &[])?;
    Ok(Examined { replica, val })
}

fn open(config: &Config, around: &Surroundings) -> Result<(Dataset, Dataset), TrainError> {
    around.registry.check()?;
    let options = OpenOptions {
        data_home: around.data_home.clone(),
        damaged_max: config.damaged_max,
        sequence: config.sequence,
        size: config.size,
        threads: threads::available(),
        elsewhere: around.elsewhere.clone(),
    };
    let (train, val) = around.registry.open_data(&config.data, &options, &around.disk)?;
    let found = train.info().classes;
    if let Some(asked) = config.classes.filter(|&asked| asked != found) {
        return Err(TrainError::Refused(format!(
            "--classes {asked} does not fit {}, which has {found} classes; type --classes {found} or leave it out",
            config.data
        )));
    }
    Ok((train, val))
}

fn assemble(
    model: &dyn Model,
    config: &Config,
    around: &Surroundings,
    (train, val): (Dataset, Dataset),
    sizing: Sizing,
) -> Result<Prepared, TrainError> {
    sizing.check(&config.model, train.info())?;
    let info = normalised(config, train.info())?;
    let training = Augment::training(config.augment, &info, sizing.resize)?;
    let evaluation = Augment::evaluation(config.augment, &info, sizing.resize)?;
    let card = card(config, &info, sizing.input, &evaluation);
    let sizes = MicroBatchSizes::of(config, around.shard, Some(train.len()));
    check_smallest(model, config, sizes, (sizing.input, info.classes))?;
    check_shares(config, sizes)?;
    let shard = config.optimizer_shard(around.shard, around.shares_memory);
    let options = own_options(config, sizes, around, (sizing.input, info.classes))?;
    let form = config.part_form(around.part.rank);
    let staged = ModelStage { model, cuts: &config.cuts, number: around.stage.rank, part: form.as_ref() };
    let (input, classes, workers) = (sizing.input, info.classes, around.shard.world);
    let (here, held_bytes) =
        (Processes::here(config, workers, around.local.world), train.held_bytes() + val.held_bytes());
    let hosted = around.hosted;
    let candidate = Candidate { model, config, input, classes, held_bytes, workers, here, resumes: false, hosted };
    candidate.check(&Limits::look())?;
    let cpu = Arc::new(Cpu::placed(config.compute_threads_among(around.local.world), config.pin));
    cpu.allow_winograd(config.winograd);
    let mut notes: Vec<String> = sizing.note.into_iter().collect();
    let mut replica = match open_gpu(config, around)? {
        None => Replica::stage(staged, options, &Place::Cpu(Arc::clone(&cpu)))?,
        Some(gpu) => {
            let mut replica = Replica::stage(staged, options, &Place::Cuda(Arc::clone(&cpu), Arc::clone(&gpu.cuda)))?;
            notes.extend(gpu.warning.clone());
            notes.extend(gpu.keep().err().map(|error| format!("what was chosen for the GPU is not kept: {error}")));
            let albums = albums(&gpu.cuda, [(&train, &training), (&val, &evaluation)])?;
            if let (Some(albums), Some(engine)) = (albums, replica.engine.cuda_mut()) {
                engine.hold(albums);
            }
            replica
        }
    };
    let holds_images = replica.engine.cuda_mut().is_some_and(|engine| engine.holds_images());
    let loader = |dataset: Dataset, augment: Augment, options: LoaderOptions| {
        // Only the first stage looks at images.
        let views = holds_images || around.stage.rank > 0 && augment.is_view();
        let (threads, shard) = (config.loader_threads, around.shard);
        // Workers that step by themselves hear of a stop where they meet: one that left while it waits for data would be missed there.
        let meets = config.steps_together() || around.shard.world == 1 || !options.shuffle;
        let (deadline, stop) = (config.deadlines.batch, meets.then(|| around.stop.clone()));
        let group = if options.shuffle { config.group() } else { 1 };
        let options = LoaderOptions { threads, shard, views, deadline, stop, group, ..options };
        Loader::new(Arc::new(dataset), augment, options, around.clock.clone())
    };
    let last = config.last_batch;
    let train = loader(train, training, LoaderOptions { last, ..LoaderOptions::training(config.batch, config.seed) })?;
    check_length(config, train.steps() as u64)?;
    let val = loader(val, evaluation, LoaderOptions::evaluation(sizes.evaluation * around.shard.world))?;
    let is_whole = around.stage.world * around.part.world == 1;
    if config.sync_batch_norm && is_whole && replica.plan().nodes_with_sums().next().is_none() {
        let name = &config.model;
        return Err(TrainError::Refused(format!(
            "{name} has no batch-norm whose statistics could be those of all workers; leave --sync-batch-norm out"
        )));
    }
    if let Some(file) = &config.weights {
        notes.extend(take_weights(file, config, around, &mut replica)?);
    }
    notes.extend((shard.is_some() && !replica.has_shard()).then(|| ONE_COPY.to_owned()));
    Ok(Prepared { replica, train, val, card, notes })
}

/// Starts from the weights of a file; says what it does not have.
fn take_weights(
    file: &str,
    config: &Config,
    around: &Surroundings,
    replica: &mut Replica,
) -> Result<Option<String>, TrainError> {
    let except: Vec<&str> = config.weights_except.iter().map(String::as_str).collect();
    let path = find_weights(&around.disk, Path::new(file))?;
    let left_out = CheckedWeights::open(&around.disk, &path)?.load(replica, &except).map_err(with_flag)?;
    let sentence = || format!("not taken from {file}, started at random: {}", left_out.join(", "));
    Ok((!left_out.is_empty()).then(sentence))
}

/// The GPU that a configuration asks for.
fn open_gpu(config: &Config, around: &Surroundings) -> Result<Option<Kept>, TrainError> {
    if config.device == Compute::Cpu {
        return Ok(None);
    }
    let found = cuda::count().unwrap_or(0);
    // Only NCCL needs a GPU for each.
    let shares = !config.sums_on_devices() || around.hosted || around.stage.world > 1;
    let number = gpus::choose(config.device, (around.local, shares), found).map_err(TrainError::Refused)?.unwrap_or(0);
    let options = Options { tf32: config.tf32, deterministic: config.deterministic, tune: true };
    let opened = Kept::open(&around.disk, around.cache.as_deref(), number, options);
    opened.map(Some).map_err(|error| TrainError::Refused(error.to_string()))
}

/// Both halves of the data on the GPU, if their images have one size, are only looked at, and take less than half of the memory that is left.
fn albums(cuda: &Cuda, halves: [(&Dataset, &Augment); 2]) -> Result<Option<Albums>, TrainError> {
    let refused = |error: CudaError| TrainError::Refused(error.to_string());
    let bytes: Option<usize> = halves.iter().map(|(set, _)| set.image_bytes()).sum();
    let (free, _) = cuda.describe().map_err(refused)?.memory_bytes;
    if halves.iter().any(|(_, augment)| !augment.is_view()) || bytes.is_none_or(|bytes| bytes > free / 2) {
        return Ok(None);
    }
    let album = |(set, augment): (&Dataset, &Augment)| -> Result<Option<Album>, TrainError> {
        let (Some(images), Some(size)) = (set.images()?, augment.output(set.info().kind)) else { return Ok(None) };
        Album::new(cuda, &images, size, (augment.tables(), augment.hole())).map(Some).map_err(refused)
    };
    let [train, val] = halves.map(album);
    Ok(train?.zip(val?).map(|(train, val)| Albums { train, val }))
}

/// How the replicas of a run with so many workers are built.
///
/// # Errors
/// When the optimizer's constants do not fit it.
pub(crate) fn options(
    config: &Config,
    sizes: MicroBatchSizes,
    (workers, hosted): (usize, bool),
    (input, classes): (Input, usize),
) -> Result<ReplicaOptions, TrainError> {
    let rule =
        config.optimizer.rule(&config.hyper_parameters).map_err(|error| TrainError::Refused(error.to_string()))?;
    Ok(ReplicaOptions {
        input,
        classes,
        micro_batch: sizes.largest,
        other_sizes: sizes.others,
        accumulate: config.accumulate,
        smoothing: config.label_smoothing,
        seed: config.seed,
        rule,
        precision: config.dtype,
        memory: config.memory,
        clip_norm: config.clip_norm,
        sync_batch_norm: config.sync_batch_norm,
        overlap: workers == 1 || config.overlap == Overlap::On,
        hosted,
        separate_gradients: false,
        shard: None,
        slots: 0,
    })
}

/// Whether batch-norms have more than one value in the smallest part of a whole batch; what an epoch leaves may be smaller.
fn check_smallest(
    model: &dyn Model,
    config: &Config,
    sizes: MicroBatchSizes,
    (input, classes): (Input, usize),
) -> Result<(), TrainError> {
    if sizes.evaluation == 1 && sizes.largest > 1 && !config.sync_batch_norm {
        Network::new(model, Mode::Train, sizes.evaluation, input, classes, 0.0)?.check_statistics()?;
    }
    Ok(())
}

/// Whether every part has a sample of every micro-batch, where layers are computed by samples.
fn check_shares(config: &Config, sizes: MicroBatchSizes) -> Result<(), TrainError> {
    let Split::Parts(PartSplit { forms, parts }) = &config.split else { return Ok(()) };
    let others = sizes.others.into_iter().filter(|&size| size > 0);
    let least = others.chain([sizes.largest]).min().unwrap_or(0);
    if least >= *parts || forms.iter().all(|(_, form)| *form != Form::Replicate) {
        return Ok(());
    }
    Err(TrainError::Refused(format!(
        "--split {} gives each of {parts} parts its share of the samples, and some batches have {least}; type --last-batch drop, \
         a larger --batch, or channel for all layers",
        config.split
    )))
}

/// How the replica of this process is built.
fn own_options(
    config: &Config,
    sizes: MicroBatchSizes,
    around: &Surroundings,
    samples: (Input, usize),
) -> Result<ReplicaOptions, TrainError> {
    let slots = slots(config, around.stage);
    Ok(ReplicaOptions {
        slots,
        separate_gradients: slots > 0 && config.schedule.separates_gradients(),
        shard: config.optimizer_shard(around.shard, around.shares_memory),
        ..options(config, sizes, (around.shard.world, around.hosted), samples)?
    })
}

/// Micro-batches that are alive at once in a stage; 0 for a whole model.
pub(crate) fn slots(config: &Config, stage: Shard) -> usize {
    match stage.world {
        1 => 0,
        stages => config.schedule.slots_max(stage.rank, stages, config.accumulate),
    }
}

/// What is known of the data, with the user's mean and deviation if they were given.
fn normalised(config: &Config, info: &Info) -> Result<Info, TrainError> {
    if config.mean.is_none() && config.std.is_none() {
        return Ok(info.clone());
    }
    let mean = config.mean.clone().unwrap_or_else(|| info.mean.clone());
    let std = config.std.clone().unwrap_or_else(|| info.std.clone());
    Ok(info.clone().with_normalisation(mean, std)?)
}

/// Adds to a refusal of weights what to type, where another head is all that differs.
fn with_flag(error: TrainError) -> TrainError {
    let layer = match &error {
        TrainError::Weights(WeightsError::Mismatch { mismatch, .. })
            if mismatch.missing.is_empty() && mismatch.unexpected.is_empty() =>
        {
            mismatch.shapes.first().and_then(|other| other.name.rsplit_once('.'))
        }
        _ => None,
    };
    match layer {
        Some((layer, _)) => TrainError::Refused(format!("{error} Type for example --except {layer}")),
        None => error,
    }
}

fn card(config: &Config, info: &Info, input: Input, evaluation: &Augment) -> Card {
    let (input, preprocess) = match input {
        Input::Image { size: [height, width], channels } => (vec![height, width, channels], evaluation.ops().to_vec()),
        Input::Tokens { sequence } => (vec![sequence], Vec::new()),
    };
    let (model, class_names) = (config.model.clone(), info.class_names.clone());
    Card { model, input, class_names, preprocess, step: 0 }
}
