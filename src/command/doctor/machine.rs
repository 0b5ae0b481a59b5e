//! A machine: its cores, memory, and what both do at best.

use crate::system::host::Host;
use crate::system::limits::{Memory, Source};
use crate::system::machine::Machine;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cpu::isa::Isa;
use serde_json::{Value, json};

/// Looks at this machine, and measures it if asked to.
pub fn look(measure: bool) -> Value {
    let (host, machine) = (Host::look(), Machine::look());
    let isas: Vec<&str> = Isa::ALL.into_iter().filter(|isa| isa.available()).map(Isa::name).collect();
    let mut found = json!({
        "host": host.name,
        "cpu": host.cpu,
        "system": host.system,
        "sockets": machine.sockets,
        "numa_nodes": machine.nodes,
        "cores": machine.cores,
        "threads": machine.threads,
        "threads_allowed": machine.allowed,
        "threads_usable": machine.usable,
        "instruction_sets": isas,
        "memory_bytes": host.memory_bytes,
        "memory_free_bytes": machine.memory_free_bytes,
        "memory_limit_bytes": limited(&host, &machine).map(|limit| limit.bytes),
        "memory_limit_by": limited(&host, &machine).map(|limit| limit.source.to_string()),
        "cpu_quota_cores": machine.limits.quota.as_ref().map(|quota| quota.cores),
        "cpu_quota_group": machine.limits.quota.as_ref().map(|quota| quota.group.as_str()),
    });
    if measure {
        let (one, all) = (Cpu::new(1).peak(), Cpu::pinned(machine.usable).peak());
        found["memory_bytes_per_s"] = json!({"one_thread": one.bytes, "all_threads": all.bytes});
        found["f32_flops_per_s"] = json!({"one_thread": one.f32_flops, "all_threads": all.f32_flops});
        found["bf16_flops_per_s"] = json!({"one_thread": one.bf16_flops, "all_threads": all.bf16_flops});
    }
    found
}

/// The least limit on memory, if it is not all that the machine has.
fn limited<'a>(host: &Host, machine: &'a Machine) -> Option<&'a Memory> {
    machine.limits.memory().filter(|limit| limit.bytes < host.memory_bytes || limit.source != Source::Machine)
}

/// What was found, for people.
pub fn lines(found: &Value) -> String {
    // Another machine may have said it: nothing that a terminal would obey is shown.
    let shown = |text: &str| text.chars().filter(|sign| !sign.is_control()).take(200).collect::<String>();
    let text = |name: &str| shown(found[name].as_str().unwrap_or_default());
    let count = |name: &str| found[name].as_u64().unwrap_or(0);
    let gib = |name: &str| count(name) as f64 / f64::from(1 << 30);
    let speed = |name: &str, of: &str| found[name][of].as_f64().unwrap_or(0.0) / 1e9;
    let many = |count: u64, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let quota = match found["cpu_quota_cores"].as_f64() {
        Some(cores) => {
            let usable = count("threads_usable");
            format!(", {usable} by the quota of {cores:.1} cores of the cgroup {}", text("cpu_quota_group"))
        }
        None => String::new(),
    };
    let limit = match found["memory_limit_bytes"].as_u64() {
        Some(_) => format!(", {} {:.1} GiB", text("memory_limit_by"), gib("memory_limit_bytes")),
        None => String::new(),
    };
    let isas = found["instruction_sets"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let isas: Vec<String> = isas.take(16).map(shown).collect();
    let bf16 = match speed("bf16_flops_per_s", "all_threads") {
        0.0 => String::new(),
        bf16 => format!(", bf16 {bf16:.0}"),
    };
    format!(
        "machine   {}: {}, {}\n\
         cores     {}, {}, {}, {}; this process may use {}{quota}\n\
         compute   {} (best last); f32 {:.0} GFLOP/s ({:.0} by one thread){bf16}\n\
         memory    {:.1} GiB, {:.1} GiB free{limit}; read at {:.1} GB/s ({:.1} by one thread)\n",
        text("host"),
        text("cpu"),
        text("system"),
        many(count("sockets"), "socket"),
        many(count("numa_nodes"), "NUMA node"),
        many(count("cores"), "core"),
        many(count("threads"), "thread"),
        count("threads_allowed"),
        isas.join(", "),
        speed("f32_flops_per_s", "all_threads"),
        speed("f32_flops_per_s", "one_thread"),
        gib("memory_bytes"),
        gib("memory_free_bytes"),
        speed("memory_bytes_per_s", "all_threads"),
        speed("memory_bytes_per_s", "one_thread"),
    )
}
