//! The GPUs of this machine: driver, libraries, memory, and measured speed of memory and arithmetic.

use crate::system::machine::find_library;
use crate::tensor::device::cuda::nvml::Monitor;
use crate::tensor::device::cuda::{self, Cuda, Options, library, nccl};
use serde_json::{Value, json};

/// What the driver of NVIDIA's GPUs is called.
const LIBRARY: &str = "libcuda.so.1";

/// Looks for GPUs and measures each.
pub fn look() -> Value {
    let path = find_library(LIBRARY).map(|path| path.display().to_string());
    let libraries: Vec<Value> = library::NEEDED
        .iter()
        .map(|library| json!({"purpose": library.purpose, "looked_for": library.files, "found": library.find()}))
        .collect();
    let (devices, problem) = match cuda::count() {
        Ok(count) => ((0..count).map(device).collect(), None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    json!({"library": LIBRARY, "path": path, "libraries": libraries, "devices": devices, "problem": problem,
        "nccl": nccl::version().ok().map(nccl::version_text)})
}

/// One GPU, or why it cannot be used.
fn device(number: usize) -> Value {
    let measured = Cuda::new(number, Options::default()).and_then(|cuda| {
        let now = Monitor::open(cuda.bus()).map(|monitor| monitor.look());
        Ok((cuda.describe()?, cuda.peak()?, cuda.bus().to_owned(), now))
    });
    match measured {
        Err(error) => json!({"number": number, "problem": error.to_string()}),
        Ok((what, peak, bus, now)) => json!({
            "number": number, "name": what.name, "capability": format!("{}.{}", what.capability.0, what.capability.1),
            "multiprocessors": what.multiprocessors, "memory_bytes": what.memory_bytes.1, "free_bytes": what.memory_bytes.0,
            "driver": what.driver_version, "cudnn": what.cudnn_version, "copy_bytes_per_s": peak.bytes,
            "f32_flops": peak.f32_flops, "bf16_flops": peak.bf16_flops, "bus": bus, "now": now,
        }),
    }
}

/// What was found, for people.
pub fn lines(found: &Value) -> String {
    let devices = found["devices"].as_array().map_or(&[][..], Vec::as_slice);
    if found["path"].is_null() && devices.is_empty() {
        return format!("gpus      none: {LIBRARY} is neither in LD_LIBRARY_PATH nor known to the loader\n");
    }
    let mut lines = match found["problem"].as_str() {
        Some(problem) => format!("gpus      none: {problem}\n"),
        None => {
            let nccl = found["nccl"].as_str().map(|version| format!(", NCCL {version}"));
            format!("gpus      {}{}\n", devices.len(), nccl.unwrap_or_default())
        }
    };
    for device in devices {
        let number = |key: &str| device[key].as_f64().unwrap_or(0.0);
        match device["problem"].as_str() {
            Some(problem) => lines += &format!("  cuda:{}  {problem}\n", device["number"]),
            None => {
                lines += &format!(
                    "  cuda:{}  {}, {:.0} GB, copies {:.2} TB/s, multiplies {:.0} TFLOP/s in bf16 and {:.0} in f32, cuDNN {}\n",
                    device["number"],
                    device["name"].as_str().unwrap_or_default(),
                    number("memory_bytes") / 1e9,
                    number("copy_bytes_per_s") / 1e12,
                    number("bf16_flops") / 1e12,
                    number("f32_flops") / 1e12,
                    device["cudnn"]
                );
                lines += &doing(&device["now"]);
            }
        }
    }
    for library in found["libraries"].as_array().into_iter().flatten().filter(|library| library["found"].is_null()) {
        lines +=
            &format!("  missing  {}: {}\n", library["purpose"].as_str().unwrap_or_default(), library["looked_for"]);
    }
    lines
}

/// What a GPU was doing before it was measured; nothing where it did not tell.
fn doing(now: &Value) -> String {
    let number = |key: &str| now[key].as_f64();
    let parts = [
        number("busy").map(|share| format!("{:.0}% busy", share * 100.0)),
        number("memory_used_bytes")
            .zip(number("memory_bytes"))
            .map(|(used, all)| format!("{:.1} of {:.0} GB taken", used / 1e9, all / 1e9)),
        number("power_w").map(|watts| format!("{watts:.0} W")),
        number("temperature_c").map(|celsius| format!("{celsius:.0} °C")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!("          {}\n", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_says_what_it_is_doing_as_far_as_it_knows() {
        let now = json!({"busy": 0.03, "memory_used_bytes": 6e8, "memory_bytes": 150e9, "power_w": 75.4, "temperature_c": 31.0});
        assert_eq!(doing(&now), "          3% busy, 0.6 of 150 GB taken, 75 W, 31 °C\n");
        assert_eq!(doing(&json!({"temperature_c": 31.0})), "          31 °C\n");
        assert_eq!(doing(&Value::Null), "");
    }
}
