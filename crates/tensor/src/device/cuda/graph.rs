//! A sequence of work that is recorded once and started by one call.
//!
//! What the host needs to start a graph grows with its nodes: 0.3 ms for the 1,574 of resnet152. Where the driver can, the sequence
//! is therefore the body of a condition that always holds: the GPU itself starts a condition's body, and the host one node.
#![allow(unsafe_code)]

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys;

use super::CudaError;
use super::driver::{Context, Stream, check};

/// The first driver whose graphs have conditions.
const CONDITIONS_SINCE: i32 = 12_040;

/// A recorded sequence of work.
#[derive(Debug)]
pub(super) struct Captured {
    executable: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: an executable graph is launched by one thread at a time: launching takes it by reference from its owner.
unsafe impl Send for Captured {}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `capture`, destroyed nowhere else.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

/// Work that is done again and again: call by call the first time, when libraries load what they load late; the second time it is
/// recorded, and from then on it is replayed.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    captured: Option<Captured>,
    runs: u64,
}

impl Recorded {
    /// Starts the work on a stream; `whole` is that of [`Stream::capture`].
    pub fn start(
        &mut self,
        stream: &Stream,
        whole: bool,
        work: impl Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.start_with(stream, whole, work, || Ok(()))
    }

    /// The same; what `right` gives is held while the recorded work is started.
    pub fn start_with<T>(
        &mut self,
        stream: &Stream,
        whole: bool,
        work: impl Fn() -> Result<(), CudaError>,
        right: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<(), CudaError> {
        self.runs += 1;
        if self.runs == 1 {
            return work();
        }
        if self.captured.is_none() {
            self.captured = Some(stream.capture(whole, work)?);
        }
        let _held = right()?;
        stream.replay(self.captured.as_ref().expect("captured above"))
    }
}

/// A graph that is being put together.
struct Draft(sys::CUgraph);

impl Drop for Draft {
    fn drop(&mut self) {
        // SAFETY: made by `Draft::new`, destroyed nowhere else; what was made executable does not need it.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

impl Draft {
    fn new() -> Result<Self, CudaError> {
        let mut graph = null_mut();
        // SAFETY: the driver writes one handle.
        check(unsafe { sys::cuGraphCreate(&mut graph, 0) }, "beginning a graph")?;
        Ok(Self(graph))
    }

    /// Adds a condition that always holds; what it holds for belongs to this graph.
    fn always(&self, context: &Context) -> Result<sys::CUgraph, CudaError> {
        let mut handle = 0;
        // SAFETY: the graph and the context live; the driver writes one handle.
        let made = unsafe { sys::cuGraphConditionalHandleCreate(&mut handle, self.0, context.handle(), 1, 1) };
        check(made, "making a condition")?;
        // SAFETY: a description of numbers and pointers, for which zeros are the documented start.
        let mut node: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
        node.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        // The condition's words: its handle, "if" with one body, where the driver puts the body, the context.
        let mut words = [0; 29];
        (words[0], words[1], words[3]) = (handle as i64, 1 << 32, context.handle() as i64);
        node.__bindgen_anon_1.reserved1 = words;
        let mut added = null_mut();
        // SAFETY: the graph lives, there are no dependencies, and the driver writes a node and, into its description, where the body is.
        unsafe {
            let status = sys::cuGraphAddNode_v2(&mut added, self.0, null(), null(), 0, &mut node);
            check(status, "adding a condition")?;
            let body = node.__bindgen_anon_1.reserved1[2] as *const sys::CUgraph;
            if body.is_null() { Err(CudaError("the driver gave a condition without a body".into())) } else { Ok(*body) }
        }
    }

    fn executable(&self, context: &Arc<Context>) -> Result<Captured, CudaError> {
        let mut executable = null_mut();
        // SAFETY: the graph lives; the driver writes one handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, self.0, 0) };
        check(made, "making a graph executable")?;
        Ok(Captured { executable, context: Arc::clone(context) })
    }
}

impl Stream {
    /// Records what `work` starts on this stream, instead of running it. `whole` says that no other GPU takes part in it.
    fn capture(&self, whole: bool, work: impl Fn() -> Result<(), CudaError>) -> Result<Captured, CudaError> {
        if whole
            && self.context().driver_version()? >= CONDITIONS_SINCE
            && let Ok(captured) = self.capture_as_body(&work)
        {
            return Ok(captured);
        }
        let draft = Draft::new()?;
        self.capture_into(draft.0, &work)?;
        draft.executable(self.context())
    }

    fn capture_as_body(&self, work: &dyn Fn() -> Result<(), CudaError>) -> Result<Captured, CudaError> {
        let draft = Draft::new()?;
        self.capture_into(draft.always(self.context())?, work)?;
        draft.executable(self.context())
    }

    fn capture_into(&self, graph: sys::CUgraph, work: &dyn Fn() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: stream and graph live; nothing that is in the graph has to come before.
        let begun = unsafe { sys::cuStreamBeginCaptureToGraph(self.handle(), graph, null(), null(), 0, mode) };
        check(begun, "beginning to record")?;
        let done = work();
        let mut same = null_mut();
        // SAFETY: the driver writes the handle of the graph that was given to it.
        let ended = check(unsafe { sys::cuStreamEndCapture(self.handle(), &mut same) }, "ending a graph");
        done.and(ended)
    }

    /// Starts a recorded graph.
    fn replay(&self, captured: &Captured) -> Result<(), CudaError> {
        // SAFETY: both live.
        check(unsafe { sys::cuGraphLaunch(captured.executable, self.handle()) }, "starting a step")
    }
}
