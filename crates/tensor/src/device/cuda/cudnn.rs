//! cuDNN's graph interface: descriptors with attributes, nothing more. What convolutions are made of them is in `convolution.rs`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use cudarc::cudnn::sys;
pub(super) use sys::cudnnBackendAttributeName_t as Name;
pub(super) use sys::cudnnBackendAttributeType_t as Kind;
pub(super) use sys::cudnnBackendDescriptorType_t as Class;

use super::CudaError;
use super::driver::{Context, Stream};

fn check(status: sys::cudnnStatus_t, what: &str) -> Result<(), CudaError> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut last = [0 as std::ffi::c_char; 512];
    // SAFETY: the first is a string of cuDNN's own that lives for ever; the second is written with its closing zero.
    let (text, last) = unsafe {
        sys::cudnnGetLastErrorString(last.as_mut_ptr(), last.len());
        (CStr::from_ptr(sys::cudnnGetErrorString(status)), CStr::from_ptr(last.as_ptr()))
    };
    let (text, last) = (text.to_string_lossy(), last.to_string_lossy());
    Err(CudaError(format!("cuDNN, {what}: {text} {}", last.trim())))
}

/// cuDNN.
#[derive(Debug)]
pub(super) struct Cudnn {
    handle: sys::cudnnHandle_t,
}

// SAFETY: a handle may move between threads; `Cuda` runs one plan at a time with it.
unsafe impl Send for Cudnn {}
// SAFETY: as above: whoever starts work holds the device's lock.
unsafe impl Sync for Cudnn {}

impl Cudnn {
    /// Starts the library.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        context.enter()?;
        let mut handle = null_mut();
        // SAFETY: cuDNN writes one handle.
        check(unsafe { sys::cudnnCreate(&mut handle) }, "starting")?;
        Ok(Self { handle })
    }

    /// The version, as 91400 for 9.14.0.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { sys::cudnnGetVersion() }
    }

    /// The handle, as an attribute.
    pub fn handle(&self) -> *mut c_void {
        self.handle.cast()
    }

    /// Starts a plan with the pointers of a variant pack.
    pub fn execute(&self, stream: &Stream, plan: &Descriptor, pack: &Descriptor) -> Result<(), CudaError> {
        // SAFETY: the stream lives, and the handle uses it until it is given another, which it is before it starts anything again; plan and
        // pack are finalised, and the pack's addresses are those of the plan's tensors.
        unsafe {
            check(sys::cudnnSetStream(self.handle, stream.handle().cast()), "taking a stream")?;
            check(sys::cudnnBackendExecute(self.handle, plan.0, pack.0), "starting a convolution")
        }
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed nowhere else.
        let _ = unsafe { sys::cudnnDestroy(self.handle) };
    }
}

/// One descriptor.
#[derive(Debug)]
pub(super) struct Descriptor(sys::cudnnBackendDescriptor_t);

// SAFETY: after finalisation a descriptor is only read.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// An empty one.
    pub fn new(class: Class) -> Result<Self, CudaError> {
        let mut descriptor = null_mut();
        // SAFETY: cuDNN writes one handle.
        check(unsafe { sys::cudnnBackendCreateDescriptor(class, &mut descriptor) }, "making a descriptor")?;
        Ok(Self(descriptor))
    }

    /// The handle, as an attribute of another.
    pub fn handle(&self) -> *mut c_void {
        self.0
    }

    /// Sets an attribute. `T` is what cuDNN documents for `kind`.
    pub fn set<T: Attribute>(self, name: Name, kind: Kind, values: &[T]) -> Result<Self, CudaError> {
        let count = values.len() as i64;
        // SAFETY: cuDNN copies `count` values of the kind's type, which `T` has the size and layout of.
        let status = unsafe { sys::cudnnBackendSetAttribute(self.0, name, kind, count, values.as_ptr().cast()) };
        check(status, &format!("setting {name:?}"))?;
        Ok(self)
    }

    /// Says that all attributes are set.
    pub fn finalize(self) -> Result<Self, CudaError> {
        // SAFETY: a descriptor that lives.
        check(unsafe { sys::cudnnBackendFinalize(self.0) }, "finishing a descriptor")?;
        Ok(self)
    }

    /// Reads an attribute into `values`; how many there were, at most as many as fit.
    pub fn get<T: Attribute>(&self, name: Name, kind: Kind, values: &mut [T]) -> Result<usize, CudaError> {
        let (room, mut count) = (values.len() as i64, 0);
        // SAFETY: cuDNN writes at most `room` values of the kind's type, which `T` has the size and layout of.
        let status =
            unsafe { sys::cudnnBackendGetAttribute(self.0, name, kind, room, &mut count, values.as_mut_ptr().cast()) };
        check(status, &format!("reading {name:?}"))?;
        Ok(usize::try_from(count).unwrap_or(0).min(values.len()))
    }

    /// Reads descriptors: cuDNN fills those that are given.
    pub fn get_all(&self, name: Name, class: Class, most: usize) -> Result<Vec<Self>, CudaError> {
        let given = (0..most).map(|_| Self::new(class)).collect::<Result<Vec<_>, _>>()?;
        let mut handles: Vec<*mut c_void> = given.iter().map(Self::handle).collect();
        let count = self.get(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut handles)?;
        Ok(given.into_iter().take(count).collect())
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed nowhere else.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

/// Types of attributes.
pub(super) trait Attribute: Copy {}
impl Attribute for i64 {}
/// Enumerations, as the numbers that they are.
impl Attribute for i32 {}
impl Attribute for f32 {}
impl Attribute for bool {}
impl Attribute for *mut c_void {}
