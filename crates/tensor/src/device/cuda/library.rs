//! Finds NVIDIA's libraries. They are loaded when a GPU is asked for, never linked: without them everything else works.
//!
//! The functions themselves are declared by `cudarc`, which panics when a library is missing; so a library is looked for here
//! first, by the names that it tries, and a missing one becomes a sentence.
#![allow(unsafe_code)]

use super::CudaError;

/// A library and the names under which it is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Library {
    /// What it is for.
    pub purpose: &'static str,
    /// File names, in the order in which they are tried.
    pub files: &'static [&'static str],
}

/// The driver.
pub const DRIVER: Library = Library { purpose: "the GPU driver", files: &["libcuda.so", "libcuda.so.1"] };

/// The compiler of kernels.
pub const NVRTC: Library =
    Library { purpose: "NVRTC, which compiles kernels", files: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"] };

/// Matrix products.
pub const CUBLASLT: Library = Library {
    purpose: "cuBLASLt, which multiplies matrices",
    files: &["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"],
};

/// Convolutions.
pub const CUDNN: Library =
    Library { purpose: "cuDNN 9, which computes convolutions", files: &["libcudnn.so", "libcudnn.so.9"] };

/// Sums over several GPUs. Only runs with `--carry nccl` need it.
pub const NCCL: Library =
    Library { purpose: "NCCL 2, which adds up gradients of several GPUs", files: &["libnccl.so.2", "libnccl.so"] };

/// What a GPU is doing.
pub const NVML: Library =
    Library { purpose: "NVML, which tells how busy a GPU is", files: &["libnvidia-ml.so.1", "libnvidia-ml.so"] };

/// What training on a GPU needs.
pub const NEEDED: [Library; 4] = [DRIVER, NVRTC, CUBLASLT, CUDNN];

impl Library {
    /// The name under which it is found, if it is.
    pub fn find(&self) -> Option<&'static str> {
        self.files.iter().copied().find(|file| load(file).is_some())
    }

    /// The library itself, for functions that `cudarc` does not declare, or what was looked for and where.
    pub(super) fn open(&self) -> Result<libloading::Library, CudaError> {
        self.files.iter().find_map(|file| load(file)).ok_or_else(|| {
            CudaError(format!(
                "{} was not found: looked for {} where the system's loader looks (LD_LIBRARY_PATH, then its cache); \
                 add its folder to LD_LIBRARY_PATH, or train with --device cpu",
                self.purpose,
                self.files.join(", ")
            ))
        })
    }

    /// Finds it, or says what was looked for and where.
    pub(super) fn require(&self) -> Result<(), CudaError> {
        self.open().map(|_| ())
    }
}

fn load(file: &str) -> Option<libloading::Library> {
    // SAFETY: loading runs the library's own initialisers; these are the vendor's, and the calls that follow run them too.
    unsafe { libloading::Library::new(file) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_files_that_were_looked_for() {
        let missing = Library { purpose: "nothing", files: &["libpaceline-nothing.so", "libpaceline-nothing.so.1"] };
        assert_eq!(missing.find(), None);
        let error = missing.require().unwrap_err().to_string();
        assert!(
            error.contains("libpaceline-nothing.so, libpaceline-nothing.so.1") && error.contains("LD_LIBRARY_PATH")
        );
    }
}
