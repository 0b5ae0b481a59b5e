//! Compiles the kernels in `kernels/*.cu` for the GPU at hand, once per process, by NVRTC.
//!
//! The sources include nothing, so that no toolkit has to be installed; `kernels/prelude.cu` comes before all of them.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};

use cudarc::nvrtc::sys;

use super::CudaError;

/// Every kernel of the device, in one piece.
const SOURCE: &str = concat!(
    include_str!("kernels/prelude.cu"),
    include_str!("kernels/elementwise.cu"),
    include_str!("kernels/batch_norm.cu"),
    include_str!("kernels/shared_norm.cu"),
    include_str!("kernels/layout.cu"),
    include_str!("kernels/pooling.cu"),
    include_str!("kernels/stem.cu"),
    include_str!("kernels/narrow.cu"),
    include_str!("kernels/rows.cu"),
    include_str!("kernels/embedding.cu"),
    include_str!("kernels/lstm.cu"),
    include_str!("kernels/update.cu"),
    include_str!("kernels/album.cu"),
);

/// How the names of kernels begin that wait themselves for the kernel ahead of them (`wait_for_last` in prelude.cu).
const EARLY: [&str; 4] = ["batch_norm_", "relu_grad_sums_", "first_totals_", "narrow_"];

/// Whether the kernel of this name waits itself for the one ahead of it.
pub(super) fn waits(name: &str) -> bool {
    EARLY.iter().any(|begin| name.starts_with(begin))
}

fn check(status: sys::nvrtcResult, what: &str) -> Result<(), CudaError> {
    if status == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: NVRTC answers with a string of its own that lives for ever.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(status)) };
    Err(CudaError(format!("{what}: {}", text.to_string_lossy())))
}

/// A program that is being compiled.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by NVRTC, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// How they are compiled, besides for which GPU.
const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"--extra-device-vectorization"];

/// What the machine code follows from, besides the GPU: the sources, how they are compiled, and by what.
pub(super) fn recipe() -> Vec<u8> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC writes two numbers.
    let _ = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    let options = OPTIONS.iter().flat_map(|option| option.to_bytes_with_nul());
    SOURCE.bytes().chain(options.copied()).chain([major, minor].into_iter().flat_map(i32::to_le_bytes)).collect()
}

/// Machine code of all kernels for a compute capability.
pub(super) fn kernels(capability: (i32, i32)) -> Result<Vec<u8>, CudaError> {
    let source = CString::new(SOURCE).expect("sources have no zero bytes");
    let mut program = Program(null_mut());
    // SAFETY: both strings end with a zero and there are no headers; NVRTC writes one handle.
    let status =
        unsafe { sys::nvrtcCreateProgram(&mut program.0, source.as_ptr(), c"paceline.cu".as_ptr(), 0, null(), null()) };
    check(status, "reading the kernels")?;
    let target = CString::new(format!("--gpu-architecture=sm_{}{}", capability.0, capability.1)).expect("digits");
    let options = [&*target, OPTIONS[0], OPTIONS[1]].map(CStr::as_ptr);
    // SAFETY: the options are strings that end with a zero and outlive the call.
    let status = unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    if status != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(CudaError(format!("the kernels do not compile: {}", log(&program))));
    }
    let mut length = 0;
    // SAFETY: NVRTC writes the length, then that many bytes.
    unsafe {
        check(sys::nvrtcGetCUBINSize(program.0, &mut length), "measuring the kernels")?;
        let mut image = vec![0u8; length];
        check(sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()), "fetching the kernels")?;
        Ok(image)
    }
}

/// What the compiler says.
fn log(program: &Program) -> String {
    let mut length = 0;
    // SAFETY: NVRTC writes the length, then that many bytes.
    unsafe {
        if sys::nvrtcGetProgramLogSize(program.0, &mut length) != sys::nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let mut text = vec![0u8; length];
        sys::nvrtcGetProgramLog(program.0, text.as_mut_ptr().cast());
        String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_begin_early_wait_for_the_last_one() {
        let mut found = 0;
        for kernel in SOURCE.split("KERNEL ").skip(2) {
            let plain = |c: char| c.is_whitespace() || c == '\\';
            let named = match kernel.strip_prefix("__launch_bounds__(") {
                Some(bounds) => bounds.split_once(')').unwrap().1.trim_start_matches(plain),
                None => kernel,
            };
            let (name, body) = (named.split_once('(').unwrap().0, named.split_once('{').unwrap().1);
            let does = body.trim_start_matches(plain).starts_with("wait_for_last();");
            assert_eq!(does, waits(name), "{name}");
            found += usize::from(does);
        }
        assert!(found > 10, "{found}");
    }
}
