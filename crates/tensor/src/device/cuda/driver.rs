//! The driver's calls, each checked: memory, streams, events, modules and launches. Nothing here knows a tensor.
//!
//! Three layers: `cudarc`'s declarations (raw), `check` around each call (checked), and types that free what they hold (safe).
//! A device address is a plain number, as in the driver: who computes one answers for it, as `Plan::verify` does for plans.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys;
pub(super) use cudarc::driver::sys::CUstream;

use super::CudaError;

/// Turns a status into a result that names what was tried.
pub(super) fn check(status: sys::CUresult, what: &str) -> Result<(), CudaError> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = null();
    // SAFETY: the driver fills in a pointer to a string of its own that lives for ever, or leaves it null.
    let text = unsafe {
        sys::cuGetErrorString(status, &mut text);
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(CudaError(format!("{what}: {text} ({status:?})")))
}

/// The primary context of one GPU.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context may be used from any thread that has made it current, which `enter` does.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks it.
unsafe impl Sync for Context {}

/// How many GPUs the driver shows.
pub(super) fn count() -> Result<usize, CudaError> {
    let mut count = 0;
    // SAFETY: the driver writes one integer.
    unsafe {
        check(sys::cuInit(0), "starting the driver")?;
        check(sys::cuDeviceGetCount(&mut count), "counting GPUs")?;
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Context {
    /// Takes the GPU with this number.
    pub fn new(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let found = count()?;
        if ordinal >= found {
            return Err(CudaError(format!("there is no GPU {ordinal}: the driver shows {found}")));
        }
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: the driver writes one handle each.
        unsafe {
            check(sys::cuDeviceGet(&mut device, ordinal as i32), "finding the GPU")?;
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), "taking the GPU")?;
        }
        let context = Arc::new(Self { device, context });
        context.enter()?;
        Ok(context)
    }

    /// The handle.
    pub fn handle(&self) -> sys::CUcontext {
        self.context
    }

    /// Makes this the GPU of the calling thread.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is held until `self` is dropped.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "entering the GPU's context")
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) }, "asking for an attribute")?;
        Ok(value)
    }

    /// Major and minor number of the compute capability.
    pub fn capability(&self) -> Result<(i32, i32), CudaError> {
        use sys::CUdevice_attribute_enum as Attribute;
        let major = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        Ok((major, self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
    }

    /// Multiprocessors.
    pub fn multiprocessors(&self) -> Result<usize, CudaError> {
        let count = self.attribute(sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(usize::try_from(count).unwrap_or(1).max(1))
    }

    /// The name that the vendor gave it.
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0 as std::ffi::c_char; 128];
        // SAFETY: the driver writes at most that many bytes and ends them with a zero.
        unsafe {
            check(sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, self.device), "asking for its name")?;
            Ok(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// Its place on the bus, as `0000:1b:00.0`.
    pub fn bus(&self) -> Result<String, CudaError> {
        let mut text = [0 as std::ffi::c_char; 32];
        // SAFETY: the driver writes at most that many bytes and ends them with a zero.
        unsafe {
            let status = sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, self.device);
            check(status, "asking for its place on the bus")?;
            Ok(CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// What tells it from every other GPU.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes sixteen bytes.
        check(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, self.device) }, "asking which GPU it is")?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Bytes that are free, and bytes there are.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two integers.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "asking for free memory")?;
        Ok((free, total))
    }

    /// The version of the driver, as 13000 for 13.0.
    pub fn driver_version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: the driver writes one integer.
        check(unsafe { sys::cuDriverGetVersion(&mut version) }, "asking for the driver's version")?;
        Ok(version)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Memory on the GPU, zeroed.
#[derive(Debug)]
pub(super) struct Memory {
    address: u64,
    bytes: usize,
    context: Arc<Context>,
}

impl Memory {
    /// Takes memory, or says how much was asked for and how much was free.
    pub fn zeroed(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Self, CudaError> {
        context.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes one address; the memory is freed once, by `drop`.
        let status = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(256)) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = context.memory()?;
            let gigabytes = |bytes: usize| bytes as f64 / 1e9;
            return Err(CudaError(format!(
                "{what} needs {:.2} GB of GPU memory; {:.2} of {:.2} GB are free",
                gigabytes(bytes),
                gigabytes(free),
                gigabytes(total)
            )));
        }
        check(status, "taking GPU memory")?;
        let memory = Self { address, bytes, context: Arc::clone(context) };
        // SAFETY: the range was just taken, and nothing else uses it. The driver clears it some time later, on a stream that others do not wait
        // for, and whoever fills it next would come too early.
        let cleared = unsafe {
            check(sys::cuMemsetD8_v2(address, 0, bytes.max(256)), "clearing GPU memory")?;
            sys::cuStreamSynchronize(null_mut())
        };
        check(cleared, "clearing GPU memory")?;
        Ok(memory)
    }

    /// Where it starts.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: taken in `zeroed`, freed nowhere else. The driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Memory of the host that the GPU copies from and to by itself.
#[derive(Debug)]
pub(super) struct Pinned {
    start: *mut u8,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Takes zeroed memory.
    pub fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        context.enter()?;
        let (mut start, bytes) = (null_mut(), bytes.max(64));
        // SAFETY: the driver writes one pointer to that many bytes, which are then cleared.
        unsafe {
            check(sys::cuMemHostAlloc(&mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE), "taking pinned memory")?;
            start.cast::<u8>().write_bytes(0, bytes);
        }
        Ok(Self { start: start.cast(), bytes, context: Arc::clone(context) })
    }

    /// All of it. Nobody copies from or to it meanwhile: who starts a copy waits for it before touching the bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` initialised bytes that belong to `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// The first bytes as numbers, under the same condition.
    pub fn floats_mut(&mut self, length: usize) -> &mut [f32] {
        assert!(length * size_of::<f32>() <= self.bytes, "no more than there is");
        // SAFETY: so many initialised bytes that belong to `self`; the driver gives whole pages, and any bits
        // are a number.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), length) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: taken in `zeroed`, freed nowhere else.
            let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

/// Work in order.
#[derive(Debug)]
pub(super) struct Stream {
    stream: CUstream,
    context: Arc<Context>,
}

// SAFETY: a stream may be used from any thread in its context; the driver locks it.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one handle.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "making a stream")?;
        Ok(Self { stream, context: Arc::clone(context) })
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The handle, for libraries.
    pub fn handle(&self) -> CUstream {
        self.stream
    }

    /// Waits until all work is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamSynchronize(self.stream) }, "computing on the GPU")
    }

    /// Lets later work of this stream begin after an event, which was recorded. In a capture, it becomes part of the graph.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        check(unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) }, "letting a stream wait")
    }

    /// Copies to the GPU, and waits.
    pub fn upload(&self, address: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the source is borrowed until the copy is done, which `wait` sees to; the target is the caller's to name.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(address, bytes.as_ptr().cast(), bytes.len(), self.stream) };
        check(status, "copying to the GPU")?;
        self.wait()
    }

    /// Copies pinned memory to the GPU, in order with the stream's other work. The bytes are left alone until then.
    pub fn upload_later(&self, address: u64, from: &Pinned, bytes: usize) -> Result<(), CudaError> {
        self.upload_part_later(address, from, 0..bytes)
    }

    /// As [`Stream::upload_later`], some of the bytes.
    pub fn upload_part_later(&self, address: u64, from: &Pinned, part: Range<usize>) -> Result<(), CudaError> {
        assert!(part.start <= part.end && part.end <= from.bytes, "no more than there is");
        // SAFETY: the memory is pinned and has these bytes, and freeing it waits for the copy.
        let status = unsafe {
            let start = from.start.add(part.start);
            sys::cuMemcpyHtoDAsync_v2(address, start.cast(), part.len(), self.stream)
        };
        check(status, "copying to the GPU")
    }

    /// Copies from the GPU, and waits.
    pub fn download(&self, address: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: the target is borrowed until the copy is done, which `wait` sees to.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address, bytes.len(), self.stream) };
        check(status, "copying from the GPU")?;
        self.wait()
    }

    /// Copies from the GPU into pinned memory, in order with the stream's other work.
    pub fn download_later(&self, address: u64, to: &mut Pinned, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes, "no more than there is room for");
        // SAFETY: as in `upload_later`.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.start.cast(), address, bytes, self.stream) };
        check(status, "copying from the GPU")
    }

    /// Copies on the GPU.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the addresses are the caller's to name.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) }, "copying on the GPU")
    }

    /// Sets every byte of a range.
    pub fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the range is the caller's to name.
        check(unsafe { sys::cuMemsetD8Async(address, byte, bytes, self.stream) }, "filling GPU memory")
    }

    /// Starts a kernel. Each argument is eight bytes, of which the kernel reads the first ones that its type has.
    pub fn launch(&self, function: Function, grid: [u32; 3], block: u32, arguments: &[u64]) -> Result<(), CudaError> {
        self.launch_with(function, grid, (block, 0, false), arguments)
    }

    /// The same with so many bytes of shared memory besides the kernel's own. With `early`, it is made ready while the kernel ahead of it
    /// ends, which it waits for itself.
    pub fn launch_with(
        &self,
        function: Function,
        grid: [u32; 3],
        (block, shared_bytes, early): (u32, u32, bool),
        arguments: &[u64],
    ) -> Result<(), CudaError> {
        let mut pointers = [null_mut::<c_void>(); 32];
        assert!(arguments.len() <= pointers.len(), "a kernel has at most {} arguments", pointers.len());
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = std::ptr::from_ref(argument).cast_mut().cast();
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let configuration = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        // SAFETY: the driver copies everything before it returns; the kernel's signature matches, as its caller asserts.
        let status = unsafe { sys::cuLaunchKernelEx(&configuration, function.0, pointers.as_mut_ptr(), null_mut()) };
        check(status, "starting a kernel")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new`, destroyed nowhere else; the driver finishes its work first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(super) struct Event {
    event: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: events may be used from any thread; the driver locks them.
unsafe impl Send for Event {}

impl Event {
    /// An event that keeps time.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut event = null_mut();
        // SAFETY: the driver writes one handle.
        check(unsafe { sys::cuEventCreate(&mut event, 0) }, "making an event")?;
        Ok(Self { event, context: Arc::clone(context) })
    }

    /// An event that only keeps streams in order.
    pub fn between(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the driver writes one handle.
        check(unsafe { sys::cuEventCreate(&mut event, flags) }, "making an event")?;
        Ok(Self { event, context: Arc::clone(context) })
    }

    /// Happens when the stream's work so far is done.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        check(unsafe { sys::cuEventRecord(self.event, stream.stream) }, "recording an event")
    }

    /// Waits until it has happened.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        check(unsafe { sys::cuEventSynchronize(self.event) }, "computing on the GPU")
    }

    /// Whether it has happened; one that was never recorded has.
    pub fn has_happened(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        let status = unsafe { sys::cuEventQuery(self.event) };
        if status == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check(status, "computing on the GPU")?;
        Ok(true)
    }

    /// Seconds since another event.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64, CudaError> {
        self.wait()?;
        let mut milliseconds = 0.0;
        // SAFETY: both have happened; the driver writes one number.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.event, self.event) };
        check(status, "reading an event's time")?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new`, destroyed nowhere else.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Compiled kernels.
#[derive(Debug)]
pub(super) struct Module {
    module: sys::CUmodule,
}

/// A kernel. Lives as long as the process: modules are never unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: a handle that the driver only reads.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
// SAFETY: as above.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Function {
    /// How many blocks of so many threads, with so much shared memory besides the kernel's own, run at the same time on one multiprocessor.
    pub fn blocks_per_multiprocessor(self, threads: u32, shared_bytes: usize) -> Result<usize, CudaError> {
        let mut blocks = 0;
        // SAFETY: the driver writes one integer.
        let status = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.0, threads as i32, shared_bytes)
        };
        check(status, "asking how many blocks fit")?;
        Ok(usize::try_from(blocks).unwrap_or(1).max(1))
    }

    /// Lets blocks have so much shared memory besides the kernel's own.
    pub fn allow_shared(self, bytes: usize) -> Result<(), CudaError> {
        let what = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the kernel lives as long as the process.
        check(unsafe { sys::cuFuncSetAttribute(self.0, what, bytes as i32) }, "asking for shared memory")
    }
}

impl Module {
    /// Loads machine code.
    pub fn load(context: &Context, image: &[u8]) -> Result<Self, CudaError> {
        context.enter()?;
        let mut module = null_mut();
        if !image.starts_with(b"\x7fELF") {
            return Err(CudaError("the machine code of the kernels is not an ELF file".into()));
        }
        // SAFETY: an image as NVRTC made it, now or before (`kept.rs`), which carries its own length.
        check(unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) }, "loading kernels")?;
        Ok(Self { module })
    }

    /// The kernel of this name.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let text = CString::new(name).expect("kernels have plain names");
        let mut function = null_mut();
        // SAFETY: the module is never unloaded; the name ends with a zero.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, self.module, text.as_ptr()) };
        check(status, &format!("finding the kernel `{name}`"))?;
        Ok(Function(function))
    }
}
