//! Convolutions by cuDNN: a problem becomes a graph of operations, the library proposes engines, and the fastest is kept.
//!
//! Images are NHWC, weights stand as output channel, row, column, input channel. A problem that occurs in many layers is tried
//! once. Which engine was chosen can be kept in a file, by number and settings, and is then built without trying.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::cudnn::{Class, Cudnn, Descriptor, Kind, Name};
use super::driver::{Event, Memory, Stream};
use super::program::Address;
use super::{Cuda, CudaError, Options};
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::window::Conv2d;

/// What is computed after the sum of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Finish {
    /// Nothing.
    None,
    /// A bias in f32 is added.
    Bias,
    /// And what is below zero becomes zero.
    BiasRelu,
    /// Only that.
    Relu,
}

/// A convolution up to its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    /// Which of the three passes.
    pub pass: ConvPass,
    /// The geometry.
    pub conv: Conv2d,
    /// N, H, W, C of the image.
    pub image: [usize; 4],
    /// Output channels.
    pub channels: usize,
    /// Of images and results, and of weights where they are operands.
    pub dtype: DType,
    /// Of the weights' gradient, where it is the result.
    pub gradient: DType,
    /// After a forward pass.
    pub finish: Finish,
}

/// The tensors' numbers.
const X: i64 = 1;
const W: i64 = 2;
const Y: i64 = 3;
const BIAS: i64 = 4;

/// An engine by number and settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Engine {
    /// Its number among cuDNN's.
    pub index: i64,
    /// Kind and value of each setting.
    pub knobs: Vec<(i32, i64)>,
    /// What one run took when it was chosen, if it was timed.
    pub seconds: Option<f64>,
}

/// Engines by problem, as a file keeps them.
pub type Engines = BTreeMap<String, Engine>;

/// A plan that is ready to run.
#[derive(Debug)]
pub(super) struct Ready {
    plan: Descriptor,
    workspace_bytes: usize,
    /// What it is made of.
    pub engine: Engine,
}

impl Problem {
    /// Its name in a file.
    pub fn key(&self) -> String {
        let Self { pass, conv, image, channels, dtype, gradient, finish } = self;
        let Conv2d { kernel, stride, padding: p, dilation, groups } = conv;
        format!(
            "{pass:?} {image:?} {channels} {kernel:?} {stride:?} {:?} {dilation:?} {groups} {dtype} {gradient} {finish:?}",
            [p.top, p.left, p.bottom, p.right]
        )
    }

    fn output(&self) -> [usize; 4] {
        let [height, width] =
            self.conv.output([self.image[1], self.image[2]]).expect("checked when the graph was built");
        [self.image[0], height, width, self.channels]
    }

    fn weight(&self) -> [usize; 4] {
        let [rows, columns] = self.conv.kernel;
        [self.channels, rows, columns, self.image[3] / self.conv.groups]
    }

    /// Bytes of x, w, y and the bias.
    fn sizes(&self) -> [(i64, usize); 4] {
        let bytes = |dims: [usize; 4], dtype: DType| dims.iter().product::<usize>() * dtype.bytes();
        let weight = if self.pass == ConvPass::GradWeight { self.gradient } else { self.dtype };
        [
            (X, bytes(self.image, self.dtype)),
            (W, bytes(self.weight(), weight)),
            (Y, bytes(self.output(), self.dtype)),
            (BIAS, self.channels * DType::F32.bytes()),
        ]
    }
}

fn data_type(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 9,
        DType::I32 => 4,
    }
}

/// A tensor whose dims are given as N, H, W, C, and stand in that order; `held` says that it has an address.
fn tensor(number: i64, [n, h, w, c]: [usize; 4], dtype: i32, held: bool) -> Result<Descriptor, CudaError> {
    let [n, h, w, c] = [n, h, w, c].map(|size| size as i64);
    Descriptor::new(Class::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
        .set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[dtype])?
        .set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Kind::CUDNN_TYPE_INT64, &[n, c, h, w])?
        .set(Name::CUDNN_ATTR_TENSOR_STRIDES, Kind::CUDNN_TYPE_INT64, &[h * w * c, 1, w * c, c])?
        .set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Kind::CUDNN_TYPE_INT64, &[number])?
        .set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Kind::CUDNN_TYPE_INT64, &[16i64])?
        .set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Kind::CUDNN_TYPE_BOOLEAN, &[!held])?
        .finalize()
}

const FLOAT: i32 = 0;

/// The operations of a problem; whatever they refer to is kept alive with them.
struct Graph {
    graph: Descriptor,
    _parts: Vec<Descriptor>,
}

impl Graph {
    fn new(cudnn: &Cudnn, problem: &Problem) -> Result<Self, CudaError> {
        let window = window(&problem.conv)?;
        let (image, weight, output) = (problem.image, problem.weight(), problem.output());
        let dtype = data_type(problem.dtype);
        let finished = problem.finish != Finish::None;
        let x = tensor(X, image, dtype, true)?;
        let weight_type = if problem.pass == ConvPass::GradWeight { problem.gradient } else { problem.dtype };
        let w = tensor(W, weight, data_type(weight_type), true)?;
        let y = if finished { tensor(10, output, FLOAT, false)? } else { tensor(Y, output, dtype, true)? };
        let operation = operation(problem.pass, &window, [&x, &w, &y])?;
        let mut parts = vec![window, x, w, y, operation];
        let mut operations = vec![parts[4].handle()];
        if finished {
            let chain = finish(problem, output)?;
            let (steps, modes) = pointwise_of(&chain, parts[3].handle())?;
            operations.extend(steps.iter().map(Descriptor::handle));
            parts.extend(chain.tensors.into_iter().chain(steps).chain(modes));
        }
        let graph = Descriptor::new(Class::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[cudnn.handle()])?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &operations)?
            .finalize()?;
        Ok(Self { graph, _parts: parts })
    }

    /// What the library proposes, best first by its own judgement.
    fn proposals(&self, fallback: bool) -> Result<Vec<Descriptor>, CudaError> {
        let mode: i32 = if fallback { 2 } else { 3 };
        Descriptor::new(Class::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .set(
                Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
                Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                &[self.graph.handle()],
            )?
            .set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Kind::CUDNN_TYPE_HEUR_MODE, &[mode])?
            .finalize()?
            .get_all(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Class::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 32)
    }

    /// The settings of an engine that was chosen before.
    fn configuration(&self, engine: &Engine) -> Result<Descriptor, CudaError> {
        let descriptor = Descriptor::new(Class::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[self.graph.handle()])?
            .set(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Kind::CUDNN_TYPE_INT64, &[engine.index])?
            .finalize()?;
        let knobs = engine.knobs.iter().map(|&(kind, value)| {
            Descriptor::new(Class::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR)?
                .set(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, Kind::CUDNN_TYPE_KNOB_TYPE, &[kind])?
                .set(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Kind::CUDNN_TYPE_INT64, &[value])?
                .finalize()
        });
        let knobs = knobs.collect::<Result<Vec<_>, _>>()?;
        let handles: Vec<*mut c_void> = knobs.iter().map(Descriptor::handle).collect();
        Descriptor::new(Class::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[descriptor.handle()])?
            .set(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &handles)?
            .finalize()
    }
}

/// The geometry, as cuDNN wants it.
fn window(conv: &Conv2d) -> Result<Descriptor, CudaError> {
    let pair = |[rows, columns]: [usize; 2]| [rows as i64, columns as i64];
    let int64 = Kind::CUDNN_TYPE_INT64;
    let p = conv.padding;
    Descriptor::new(Class::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
        .set(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[FLOAT])?
        .set(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, Kind::CUDNN_TYPE_CONVOLUTION_MODE, &[1i32])?
        .set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, int64, &[2i64])?
        .set(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, int64, &pair(conv.dilation))?
        .set(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, int64, &pair(conv.stride))?
        .set(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, int64, &pair([p.top, p.left]))?
        .set(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, int64, &pair([p.bottom, p.right]))?
        .finalize()
}

fn operation(pass: ConvPass, window: &Descriptor, [x, w, y]: [&Descriptor; 3]) -> Result<Descriptor, CudaError> {
    let (class, names) = match pass {
        ConvPass::Forward => (
            Class::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            ],
        ),
        ConvPass::GradInput => (
            Class::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            ],
        ),
        ConvPass::GradWeight => (
            Class::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            ],
        ),
    };
    let mut descriptor = Descriptor::new(class)?;
    for (name, part) in names.into_iter().zip([window, x, w, y]) {
        descriptor = descriptor.set(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[part.handle()])?;
    }
    descriptor
        .set(names[4], Kind::CUDNN_TYPE_FLOAT, &[1.0f32])?
        .set(names[5], Kind::CUDNN_TYPE_FLOAT, &[0.0f32])?
        .finalize()
}

/// What follows a forward convolution: a mode of `pointwise` and its second operand, each with its result.
struct Chain {
    /// By step: mode, second operand among the tensors, result among the tensors.
    steps: Vec<(i32, Option<usize>, usize)>,
    tensors: Vec<Descriptor>,
}

fn finish(problem: &Problem, output: [usize; 4]) -> Result<Chain, CudaError> {
    const ADD: i32 = 0;
    const RELU: i32 = 100;
    let (bias, result) = ([1, 1, 1, problem.channels], tensor(Y, output, data_type(problem.dtype), true)?);
    let mut tensors = vec![result];
    let steps = match problem.finish {
        Finish::None => Vec::new(),
        Finish::Relu => vec![(RELU, None, 0)],
        Finish::Bias => {
            tensors.push(tensor(BIAS, bias, FLOAT, true)?);
            vec![(ADD, Some(1), 0)]
        }
        Finish::BiasRelu => {
            tensors.push(tensor(BIAS, bias, FLOAT, true)?);
            tensors.push(tensor(11, output, FLOAT, false)?);
            vec![(ADD, Some(1), 2), (RELU, None, 0)]
        }
    };
    Ok(Chain { steps, tensors })
}

/// The operations of a chain that starts with the tensor `input`, and the descriptors of their modes.
fn pointwise_of(chain: &Chain, mut input: *mut c_void) -> Result<(Vec<Descriptor>, Vec<Descriptor>), CudaError> {
    let (mut operations, mut modes) = (Vec::new(), Vec::new());
    for &(mode, other, result) in &chain.steps {
        let how = Descriptor::new(Class::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_POINTWISE_MODE, Kind::CUDNN_TYPE_POINTWISE_MODE, &[mode])?
            .set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Kind::CUDNN_TYPE_DATA_TYPE, &[FLOAT])?
            .finalize()?;
        let kind = Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        let mut operation = Descriptor::new(Class::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind, &[how.handle()])?
            .set(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, kind, &[input])?;
        if let Some(other) = other {
            let handle = chain.tensors[other].handle();
            operation = operation.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, kind, &[handle])?;
        }
        input = chain.tensors[result].handle();
        operations.push(operation.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, kind, &[input])?.finalize()?);
        modes.push(how);
    }
    Ok((operations, modes))
}

/// Number, settings and notes of a proposal.
fn look(configuration: &Descriptor) -> Result<(Engine, Vec<i32>), CudaError> {
    let engine_class = Class::CUDNN_BACKEND_ENGINE_DESCRIPTOR;
    let engines = configuration.get_all(Name::CUDNN_ATTR_ENGINECFG_ENGINE, engine_class, 1)?;
    let engine = engines.first().ok_or_else(|| CudaError("cuDNN proposes no engine".into()))?;
    let mut index = [0i64];
    engine.get(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Kind::CUDNN_TYPE_INT64, &mut index)?;
    let mut notes = [0i32; 16];
    let count = engine.get(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Kind::CUDNN_TYPE_NUMERICAL_NOTE, &mut notes)?;
    let choice_class = Class::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR;
    let choices = configuration.get_all(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, choice_class, 64)?;
    let mut knobs = Vec::with_capacity(choices.len());
    for choice in &choices {
        let (mut kind, mut value) = ([0i32], [0i64]);
        choice.get(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, Kind::CUDNN_TYPE_KNOB_TYPE, &mut kind)?;
        choice.get(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Kind::CUDNN_TYPE_INT64, &mut value)?;
        knobs.push((kind[0], value[0]));
    }
    Ok((Engine { index: index[0], knobs, seconds: None }, notes[..count].to_vec()))
}

/// Whether an engine with these notes keeps what was asked for.
fn allowed(notes: &[i32], problem: &Problem, options: &Options) -> bool {
    const TENSOR_CORES: i32 = 0;
    const DOWN_CONVERTS: i32 = 1;
    const REDUCED: i32 = 2;
    const NOT_DETERMINISTIC: i32 = 4;
    // Matrix units take f32 only after rounding it to tf32.
    let rounds = notes.contains(&DOWN_CONVERTS) || notes.contains(&TENSOR_CORES);
    let exact = problem.dtype != DType::F32 || options.tf32 || !rounds;
    exact && !notes.contains(&REDUCED) && !(options.deterministic && notes.contains(&NOT_DETERMINISTIC))
}

/// Builds a plan, if the library can.
fn build(cudnn: &Cudnn, configuration: &Descriptor, engine: Engine) -> Result<Ready, CudaError> {
    let plan = Descriptor::new(Class::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[cudnn.handle()])?
        .set(
            Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
            Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR,
            &[configuration.handle()],
        )?
        .finalize()?;
    let mut bytes = [0i64];
    plan.get(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, Kind::CUDNN_TYPE_INT64, &mut bytes)?;
    Ok(Ready { plan, workspace_bytes: usize::try_from(bytes[0]).unwrap_or(0), engine })
}

/// Working memory that an engine may want, and what it may want without being faster for it.
const WORKSPACE_MAX: usize = 2 << 30;
const WORKSPACE_LITTLE: usize = 32 << 20;

/// The plan for a problem: that of a known engine, or the fastest of those proposed.
pub(super) fn prepare(cuda: &Cuda, problem: &Problem, known: Option<&Engine>) -> Result<Ready, CudaError> {
    let (cudnn, options) = (cuda.cudnn(), cuda.options());
    let graph = Graph::new(cudnn, problem)?;
    if let Some(engine) = known
        && let Ok(ready) =
            graph.configuration(engine).and_then(|configuration| build(cudnn, &configuration, engine.clone()))
    {
        return Ok(ready);
    }
    let mut trial = None;
    let mut best: Option<Ready> = None;
    for fallback in [false, true] {
        if best.is_some() {
            break;
        }
        // An error here says that no engine fits.
        for configuration in graph.proposals(fallback).unwrap_or_default() {
            let Ok((engine, notes)) = look(&configuration) else { continue };
            if !allowed(&notes, problem, options) {
                continue;
            }
            let Ok(mut ready) = build(cudnn, &configuration, engine) else { continue };
            if ready.workspace_bytes > WORKSPACE_MAX {
                continue;
            }
            if !options.tune {
                return Ok(ready);
            }
            let trial = match &mut trial {
                Some(trial) => trial,
                None => trial.insert(Trial::new(cuda, problem)?),
            };
            let limit = best.as_ref().and_then(|best| best.engine.seconds).unwrap_or(f64::INFINITY);
            let Ok(seconds) = trial.time(cuda, problem, &ready, limit) else { continue };
            ready.engine.seconds = Some(seconds);
            // Working memory is paid by every layer: more than little of it has to be worth it.
            let greedy = |ready: &Ready| ready.workspace_bytes > WORKSPACE_LITTLE;
            let better = match &best {
                Some(best) if greedy(&ready) && !greedy(best) => seconds < 0.95 * limit,
                Some(best) if !greedy(&ready) && greedy(best) => seconds < 1.05 * limit,
                _ => seconds < limit,
            };
            if better {
                best = Some(ready);
            }
        }
    }
    best.ok_or_else(|| CudaError(format!("cuDNN has no engine for {}", problem.key())))
}

/// Tensors of a problem, to time plans on.
struct Trial {
    tensors: Vec<(i64, Memory)>,
    workspace: Memory,
    events: [Event; 2],
}

impl Trial {
    fn new(cuda: &Cuda, problem: &Problem) -> Result<Self, CudaError> {
        let context = cuda.context();
        let mut tensors = Vec::new();
        for (number, bytes) in problem.sizes() {
            let memory = Memory::zeroed(context, bytes, "trying convolutions")?;
            cuda.fill_with_noise(memory.address(), bytes, if number == BIAS { DType::F32 } else { problem.dtype })?;
            tensors.push((number, memory));
        }
        let workspace = Memory::zeroed(context, 1 << 20, "trying convolutions")?;
        Ok(Self { tensors, workspace, events: [Event::new(context)?, Event::new(context)?] })
    }

    /// Seconds of one run; gives up on what is much slower than `limit`.
    fn time(&mut self, cuda: &Cuda, problem: &Problem, ready: &Ready, limit: f64) -> Result<f64, CudaError> {
        if ready.workspace_bytes > self.workspace.bytes() {
            self.workspace = Memory::zeroed(cuda.context(), ready.workspace_bytes, "trying convolutions")?;
        }
        let used = |number: i64| number != BIAS || matches!(problem.finish, Finish::Bias | Finish::BiasRelu);
        let tensors: Vec<(i64, u64)> = self
            .tensors
            .iter()
            .filter(|(number, _)| used(*number))
            .map(|(number, memory)| (*number, memory.address()))
            .collect();
        let pack = pack(&tensors, self.workspace.address())?;
        let stream = cuda.stream();
        let run = |times: usize| {
            self.events[0].record(stream)?;
            (0..times).try_for_each(|_| cuda.cudnn().execute(cuda.stream(), &ready.plan, &pack))?;
            self.events[1].record(stream)?;
            Ok::<f64, CudaError>(self.events[1].seconds_since(&self.events[0])? / times as f64)
        };
        run(1)?;
        let once = run(1)?;
        if once > 2.0 * limit {
            return Ok(once);
        }
        Ok(run(3)?.min(run(3)?))
    }
}

/// Pointers for a run of a plan.
fn pack(tensors: &[(i64, u64)], workspace: u64) -> Result<Descriptor, CudaError> {
    let numbers: Vec<i64> = tensors.iter().map(|tensor| tensor.0).collect();
    let pointers: Vec<*mut c_void> = tensors.iter().map(|tensor| tensor.1 as *mut c_void).collect();
    Descriptor::new(Class::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
        .set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, &numbers)?
        .set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR, &pointers)?
        .set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Kind::CUDNN_TYPE_VOID_PTR, &[workspace as *mut c_void])?
        .finalize()
}

/// A plan with its addresses.
#[derive(Debug)]
pub(super) struct Convolution {
    ready: Arc<Ready>,
    tensors: Vec<(i64, Address)>,
    workspace: Address,
    pack: Option<Descriptor>,
}

impl Convolution {
    /// Of x, w and y, or of their gradients where they are results, and of the bias if there is one.
    pub fn new(ready: Arc<Ready>, [x, w, y]: [Address; 3], bias: Option<Address>, workspace: Address) -> Self {
        let mut tensors = vec![(X, x), (W, w), (Y, y)];
        tensors.extend(bias.map(|bias| (BIAS, bias)));
        Self { ready, tensors, workspace, pack: None }
    }

    /// Completes the addresses.
    pub fn complete(&mut self, address: &dyn Fn(Address) -> u64) -> Result<(), CudaError> {
        let tensors: Vec<(i64, u64)> = self.tensors.iter().map(|&(number, tensor)| (number, address(tensor))).collect();
        self.pack = Some(pack(&tensors, address(self.workspace))?);
        Ok(())
    }

    /// Starts it on a stream.
    pub fn start(&self, cudnn: &Cudnn, stream: &Stream) -> Result<(), CudaError> {
        cudnn.execute(stream, &self.ready.plan, self.pack.as_ref().expect("a program is completed before it runs"))
    }
}

impl Ready {
    /// Bytes of working memory.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
}
