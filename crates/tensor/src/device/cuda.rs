//! An NVIDIA GPU: the same plans as on the CPU, in NHWC. Convolutions by cuDNN, matrix products by cuBLASLt, the rest by kernels
//! of our own (`cuda/kernels/*.cu`), compiled when the device is opened.
//!
//! A plan becomes a program (`program.rs`): calls with all their arguments. `bound.rs` runs it node by node for an [`crate::Executor`], with the
//! tensors of the host's store; [`session`] keeps everything on the GPU and runs a whole step, optimizer included, as one graph.
//!
//! Nothing is linked: libraries are loaded when a device is opened (`library.rs`), and a missing one is an error with a sentence.

pub(crate) mod bound;
mod compile;
mod convolution;
mod cudnn;
mod driver;
mod graph;
mod join;
pub mod kept;
pub mod library;
mod lower;
pub mod nccl;
pub mod nvml;
mod peak;
mod product;
mod program;
pub mod session;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use convolution::{Engine, Engines};
use convolution::{Problem, Ready};
use cudnn::Cudnn;
use driver::{Context, Function, Module, Stream};
use product::Blas;

use crate::dtype::DType;

/// Something that the GPU or one of its libraries refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CudaError(pub String);

/// How a GPU computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether products of f32 may round their operands to 10 bits (tf32).
    pub tf32: bool,
    /// Whether only algorithms are used that give the same bits every time.
    pub deterministic: bool,
    /// Whether convolutions try all proposed engines and keep the fastest; otherwise the first is taken.
    pub tune: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { tf32: false, deterministic: false, tune: true }
    }
}

/// One GPU.
#[derive(Debug)]
pub struct Cuda {
    options: Options,
    /// What was prepared, or why it could not be.
    prepared: Mutex<HashMap<Problem, Result<Arc<Ready>, CudaError>>>,
    known: Mutex<Engines>,
    running: Mutex<()>,
    cudnn: Cudnn,
    blas: Blas,
    module: Module,
    stream: Stream,
    side: Stream,
    context: Arc<Context>,
    name: String,
    bus: String,
    multiprocessors: usize,
    /// Whether a kernel may be made ready while the one ahead of it ends.
    starts_early: bool,
}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The vendor's name of it.
    pub name: String,
    /// Major and minor number.
    pub capability: (i32, i32),
    /// Its multiprocessors.
    pub multiprocessors: usize,
    /// Bytes that are free and that there are.
    pub memory_bytes: (usize, usize),
    /// As 13000 for 13.0.
    pub driver_version: i32,
    /// As 91400 for 9.14.0.
    pub cudnn_version: usize,
}

/// How many GPUs there are; an error says what is missing.
///
/// # Errors
/// When the driver is not there or does not start.
pub fn count() -> Result<usize, CudaError> {
    library::DRIVER.require()?;
    driver::count()
}

impl Cuda {
    /// Opens a GPU by number.
    ///
    /// # Errors
    /// When a library is missing, which the sentence names, or the GPU is.
    pub fn new(ordinal: usize, options: Options) -> Result<Self, CudaError> {
        Self::with_code(ordinal, options, compile::kernels)
    }

    /// The same with machine code of the kernels for a compute capability from elsewhere.
    fn with_code(
        ordinal: usize,
        options: Options,
        code: impl FnOnce((i32, i32)) -> Result<Vec<u8>, CudaError>,
    ) -> Result<Self, CudaError> {
        library::NEEDED.iter().try_for_each(library::Library::require)?;
        let context = Context::new(ordinal)?;
        let stream = Stream::new(&context)?;
        let module = Module::load(&context, &code(context.capability()?)?)?;
        Ok(Self {
            options,
            prepared: Mutex::default(),
            known: Mutex::default(),
            running: Mutex::default(),
            cudnn: Cudnn::new(&context)?,
            blas: Blas::new()?,
            module,
            name: context.name()?,
            bus: context.bus()?,
            multiprocessors: context.multiprocessors()?,
            starts_early: context.capability()? >= (9, 0),
            stream,
            side: Stream::new(&context)?,
            context,
        })
    }

    /// What it is.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn describe(&self) -> Result<Description, CudaError> {
        Ok(Description {
            name: self.name.clone(),
            capability: self.context.capability()?,
            multiprocessors: self.multiprocessors,
            memory_bytes: self.context.memory()?,
            driver_version: self.context.driver_version()?,
            cudnn_version: self.cudnn.version(),
        })
    }

    /// Its place on the bus, by which other libraries know it.
    pub fn bus(&self) -> &str {
        &self.bus
    }

    /// What tells it from every other GPU, wherever that is.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        self.context.uuid()
    }

    /// The vendor's name of it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it computes.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Takes over engines that were chosen before on such a GPU.
    pub fn adopt(&self, engines: Engines) {
        lock(&self.known).extend(engines);
    }

    /// The engines of all convolutions that were prepared or adopted.
    pub fn engines(&self) -> Engines {
        let mut engines = lock(&self.known).clone();
        let prepared = lock(&self.prepared);
        let ready =
            prepared.iter().filter_map(|(problem, ready)| Some((problem.key(), ready.as_ref().ok()?.engine.clone())));
        engines.extend(ready);
        engines
    }

    /// Makes this the GPU of the calling thread and the caller its only user.
    fn enter(&self) -> Result<MutexGuard<'_, ()>, CudaError> {
        self.context.enter()?;
        Ok(lock(&self.running))
    }

    fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What is computed beside the rest goes here.
    fn side(&self) -> &Stream {
        &self.side
    }

    fn cudnn(&self) -> &Cudnn {
        &self.cudnn
    }

    fn blas(&self) -> &Blas {
        &self.blas
    }

    fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    fn starts_early(&self) -> bool {
        self.starts_early
    }

    fn function(&self, name: &str) -> Result<Function, CudaError> {
        self.module.function(name)
    }

    /// The plan of a convolution: made once for all layers that are alike.
    fn prepare(&self, problem: &Problem) -> Result<Arc<Ready>, CudaError> {
        if let Some(found) = lock(&self.prepared).get(problem) {
            return found.clone();
        }
        let known = lock(&self.known).get(&problem.key()).cloned();
        let made = convolution::prepare(self, problem, known.as_ref()).map(Arc::new);
        lock(&self.prepared).insert(*problem, made.clone());
        made
    }

    /// What a convolution takes, where it is known or may be tried. Where nothing is tried, nothing is built to find out.
    fn seconds(&self, problem: &Problem) -> Option<f64> {
        let asks = self.options.tune || lock(&self.known).contains_key(&problem.key());
        if asks { self.prepare(problem).ok()?.engine.seconds } else { None }
    }

    /// Numbers to try kernels on.
    fn fill_with_noise(&self, address: u64, bytes: usize, dtype: DType) -> Result<(), CudaError> {
        let (elements, name) = (bytes / dtype.bytes(), format!("noise_{}", program::suffix(dtype)));
        let blocks = elements.div_ceil(256).clamp(1, 4096) as u32;
        self.stream.launch(self.function(&name)?, [blocks, 1, 1], 256, &[address, elements as u64])
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
