//! How batches come to the GPU: at once, while the step before computes, or as a look at images that are there.
//!
//! Nothing here waits for the GPU's work except [`Session::fill`], which has one place to copy from.

use std::sync::Arc;

use super::{AHEAD, Album, DeviceGraph, Session};
use crate::bf16::Bf16;
use crate::buffer::bytes_of;
use crate::device::cuda::driver::{Event, Memory, Pinned, Stream};
use crate::device::cuda::{Cuda, CudaError};
use crate::dtype::DType;
use crate::graph::Value;

/// A batch, as the host has it. It may be smaller than planned.
#[derive(Clone, Copy, Debug)]
pub enum Samples<'a> {
    /// Pixels.
    Images(&'a [f32]),
    /// Tokens.
    Tokens(&'a [i32]),
}

impl Samples<'_> {
    /// Bytes as this type.
    fn bytes(&self, dtype: DType) -> usize {
        match self {
            Self::Images(images) => images.len() * dtype.bytes(),
            Self::Tokens(tokens) => tokens.len() * dtype.bytes(),
        }
    }

    /// Writes them as this type.
    fn write(&self, dtype: DType, to: &mut [u8]) {
        match (self, dtype) {
            (Self::Images(images), DType::F32) => to.copy_from_slice(bytes_of(images)),
            (Self::Images(images), DType::Bf16) => {
                let (words, _) = to.as_chunks_mut::<2>();
                words.iter_mut().zip(*images).for_each(|(to, &x)| *to = Bf16::from_f32(x).to_bits().to_ne_bytes());
            }
            (Self::Tokens(tokens), DType::I32) => to.copy_from_slice(bytes_of(tokens)),
            _ => panic!("the graph is fed with what it asks for"),
        }
    }
}

/// Numbers of a view of an image, as the kernel `look` reads them: sample, top, left, 1 if mirrored and 2 more if
/// reflected, and the hole's first row, first column,
/// last row and last column, the last excluded.
pub type View = [i32; 8];

/// Memory by which batches come.
#[derive(Debug)]
pub(super) struct Input {
    /// The samples of a batch that is brought at once.
    direct: Option<Pinned>,
    /// What is small: views, classes, the loss's gradient. As many as may be under way.
    slips: Vec<(Pinned, Event)>,
    written: usize,
    views: Memory,
    /// Two batches that come while others are computed, once somebody asks for it.
    trays: Vec<Tray>,
    /// The tray with the batch that comes next.
    coming: Option<usize>,
    /// Of the largest batch.
    sample_bytes: usize,
    /// Copies to the GPU while it computes.
    copies: Stream,
}

/// A batch on its way.
#[derive(Debug)]
struct Tray {
    pinned: Pinned,
    memory: Memory,
    length: usize,
    /// It has arrived.
    arrived: Event,
    /// It was taken over by a step.
    taken: Event,
}

impl Input {
    pub fn new<'a>(cuda: &Cuda, graphs: impl Iterator<Item = &'a DeviceGraph> + Clone) -> Result<Self, CudaError> {
        let context = cuda.context();
        let most = |value: fn(&DeviceGraph) -> Value| {
            graphs.clone().map(|graph| graph.plan.graph().info(value(graph)).bytes()).max().unwrap_or(0)
        };
        let (bytes, targets) = (most(|graph| graph.bindings.x), most(|graph| graph.bindings.targets));
        let views = graphs.clone().map(|graph| graph.plan.graph().shape(graph.bindings.x)[0]).max().unwrap_or(0)
            * size_of::<View>();
        let slips = (0..AHEAD).map(|_| Ok((Pinned::zeroed(context, views + targets + 4)?, Event::new(context)?)));
        Ok(Self {
            direct: None,
            slips: slips.collect::<Result<Vec<_>, CudaError>>()?,
            written: 0,
            views: Memory::zeroed(context, views, "the views of a batch")?,
            trays: Vec::new(),
            coming: None,
            sample_bytes: bytes,
            copies: Stream::new(context)?,
        })
    }

    /// Bytes that it holds on the GPU.
    pub fn bytes(&self) -> usize {
        self.views.bytes() + self.trays.iter().map(|tray| tray.memory.bytes()).sum::<usize>()
    }

    /// Has small parts copied in order with the stream's other work.
    fn slip(&mut self, stream: &Stream, parts: &[(u64, &[u8])]) -> Result<(), CudaError> {
        let (pinned, copied) = &mut self.slips[self.written % AHEAD];
        if self.written >= AHEAD {
            copied.wait()?;
        }
        let mut at = 0;
        for (address, part) in parts {
            pinned.bytes_mut()[at..at + part.len()].copy_from_slice(part);
            stream.upload_part_later(*address, pinned, at..at + part.len())?;
            at += part.len();
        }
        copied.record(stream)?;
        self.written += 1;
        Ok(())
    }
}

impl Session {
    fn graph(&self, trains: bool) -> &DeviceGraph {
        if trains { self.training() } else { &self.eval }
    }

    /// Has classes and the gradient of the loss copied, and views if there are some.
    fn slip(&mut self, targets: &[i32], seed: Option<f32>, views: &[View]) -> Result<(), CudaError> {
        let graph = self.graph(seed.is_some());
        let mut padded = vec![0i32; graph.plan.graph().info(graph.bindings.targets).shape.elements()];
        padded[..targets.len()].copy_from_slice(targets);
        let seeds = [seed.unwrap_or(0.0)];
        let mut parts = vec![(graph.address(graph.bindings.targets), bytes_of(&padded))];
        if let (Some(value), true) = (graph.bindings.seed, seed.is_some()) {
            parts.push((graph.address(value), bytes_of(&seeds)));
        }
        if !views.is_empty() {
            parts.push((self.input.views.address(), bytes_of(views.as_flattened())));
        }
        self.input.slip(self.cuda.stream(), &parts)?;
        self.rows = targets.len() as u32;
        Ok(())
    }

    /// Brings a batch to the GPU, with zeros where it is smaller than planned. `seed` is the gradient of its loss, for training.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the batch is larger than planned, or of another kind.
    pub fn fill(&mut self, samples: Samples<'_>, targets: &[i32], seed: Option<f32>) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let (graph, stream) = (self.graph(seed.is_some()), cuda.stream());
        let info = graph.plan.graph().info(graph.bindings.x);
        let (dtype, room, address) = (info.dtype, info.bytes(), graph.address(graph.bindings.x));
        let bytes = samples.bytes(dtype);
        assert!(bytes <= room, "no more samples than planned");
        // The last copy from here is done.
        stream.wait()?;
        if self.input.direct.is_none() {
            self.input.direct = Some(Pinned::zeroed(cuda.context(), self.input.sample_bytes)?);
        }
        let direct = self.input.direct.as_mut().expect("taken above");
        samples.write(dtype, &mut direct.bytes_mut()[..bytes]);
        if bytes < room {
            stream.fill(address, 0, room)?;
        }
        stream.upload_part_later(address, direct, 0..bytes)?;
        self.slip(targets, seed, &[])
    }

    /// Has the samples of a training batch brought while the GPU computes something else; [`Session::fill_coming`] takes them over.
    ///
    /// # Errors
    /// When the GPU does not answer, or has no room for two batches more.
    ///
    /// # Panics
    /// When the batch is larger than planned, or of another kind.
    pub fn prefetch(&mut self, samples: Samples<'_>) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        cuda.context().enter()?;
        let (graph, input) = (self.graph(true), &self.input);
        let dtype = graph.plan.graph().dtype(graph.bindings.x);
        let bytes = samples.bytes(dtype);
        assert!(bytes <= input.sample_bytes, "no more samples than planned");
        let input = &mut self.input;
        while input.trays.len() < 2 {
            let context = cuda.context();
            input.trays.push(Tray {
                pinned: Pinned::zeroed(context, input.sample_bytes)?,
                memory: Memory::zeroed(context, input.sample_bytes, "a batch that comes while another is computed")?,
                length: 0,
                arrived: Event::new(context)?,
                taken: Event::new(context)?,
            });
        }
        let number = input.coming.map_or(0, |last| 1 - last);
        let tray = &mut input.trays[number];
        // Both were recorded long ago, or never: whoever brings a batch has taken over the one before.
        tray.arrived.wait()?;
        samples.write(dtype, &mut tray.pinned.bytes_mut()[..bytes]);
        input.copies.wait_for(&tray.taken)?;
        input.copies.upload_part_later(tray.memory.address(), &tray.pinned, 0..bytes)?;
        tray.arrived.record(&input.copies)?;
        tray.length = bytes;
        input.coming = Some(number);
        Ok(())
    }

    /// Makes the batch whose samples were brought last the one that is computed next.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When none was brought.
    pub fn fill_coming(&mut self, targets: &[i32], seed: f32) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let (graph, stream) = (self.graph(true), cuda.stream());
        let (room, address) = (graph.plan.graph().info(graph.bindings.x).bytes(), graph.address(graph.bindings.x));
        let tray = &self.input.trays[self.input.coming.expect("a batch was brought")];
        stream.wait_for(&tray.arrived)?;
        if tray.length < room {
            stream.fill(address, 0, room)?;
        }
        stream.copy(address, tray.memory.address(), tray.length)?;
        tray.taken.record(stream)?;
        self.slip(targets, Some(seed), &[])
    }

    /// Makes a batch of images that are on the GPU.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the album has images of another size than the graph is fed with, or a view is of none of them.
    pub fn look(&mut self, album: &Album, views: &[View], targets: &[i32], seed: Option<f32>) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let graph = self.graph(seed.is_some());
        let (info, address) = (graph.plan.graph().info(graph.bindings.x), graph.address(graph.bindings.x));
        assert!(info.dtype.is_float() && info.shape[1..] == album.size(), "images of the graph's size");
        assert!(
            views.len() <= info.shape[0] && views.iter().all(|view| album.has(view[0])),
            "views of images there are"
        );
        let (elements, dtype) = (info.shape.elements(), info.dtype);
        self.slip(targets, seed, views)?;
        album.look(&cuda, (self.input.views.address(), views.len()), (address, elements, dtype))
    }
}
