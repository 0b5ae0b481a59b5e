//! Data: sets of samples, their order, their augmentation, and the loader that turns them into batches.
//!
//! A batch is a pure function of (seed, epoch, step, rank): [`order`] decides which samples it holds, [`dataset`] reads
//! them, [`augment`] changes them, [`batch`] lays them out for the engine, and [`loader`] does all of this ahead of
//! training on threads of its own, in order. Nothing has to be saved to continue a run or to say which samples it saw.
//!
//! What is deliberately absent: tensors and devices (a batch is plain slices), downloading (the user gives a folder),
//! the environment (the binary reads `PACELINE_DATA` and passes it in) and printing (callers show what these values say).

pub mod augment;
pub mod batch;
pub mod cifar10;
pub mod dataset;
pub mod decode;
pub mod error;
pub mod far;
pub mod folder;
pub mod inspect;
pub mod loader;
pub mod mnist;
pub mod order;
pub mod outline;
pub mod own;
pub mod pixels;
pub mod resize;
pub mod shapes;
pub mod spec;
pub mod synthetic;
pub mod text;

pub use augment::{Augment, AugmentChoice};
pub use batch::Batch;
pub use dataset::{Dataset, Info, OpenOptions, SampleKind, Split};
pub use error::DataError;
pub use loader::{Loader, LoaderOptions};
pub use order::{LastBatch, Order, Shard};
pub use own::{OwnData, Sample, Samples};
pub use spec::Spec;
