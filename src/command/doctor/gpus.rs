//! The GPUs of this machine. So far: whether their driver's library is there.

use paceline::system::machine::find_library;
use serde_json::{Value, json};

/// What the driver of NVIDIA's GPUs is called.
const LIBRARY: &str = "libcuda.so.1";

/// Looks for GPUs.
pub fn look() -> Value {
    json!({"library": LIBRARY, "path": find_library(LIBRARY).map(|path| path.display().to_string())})
}

/// What was found, for people.
pub fn lines(found: &Value) -> String {
    match found["path"].as_str() {
        Some(path) => format!("gpus      {LIBRARY} is there ({path}); this version computes on the CPU\n"),
        None => format!("gpus      none: {LIBRARY} is neither in LD_LIBRARY_PATH nor known to the loader\n"),
    }
}
