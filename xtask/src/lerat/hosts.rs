//! Hosts on one machine for `cargo x lerat`: network namespaces with a cable each to a switch, on which the kernel lets so many bits through
//! a second. Removed when they are let go.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// So many hosts.
pub struct Hosts {
    count: usize,
    name: String,
}

impl Hosts {
    /// Hosts with cables of so many bits a second.
    pub fn new(count: usize, bits_per_s: u64) -> Result<Self> {
        remove_abandoned();
        let hosts = Self { count, name: format!("lerat{}", std::process::id()) };
        let switch = hosts.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add switch type bridge"))?;
        ip(&format!("-n {switch} link set switch up"))?;
        for number in 0..count {
            let host = hosts.host(number);
            ip(&format!("netns add {host}"))?;
            ip(&format!("-n {host} link add card type veth peer name port{number} netns {switch}"))?;
            ip(&format!("-n {switch} link set port{number} master switch up"))?;
            ip(&format!("-n {host} address add {}/24 dev card", hosts.address(number)))?;
            ip(&format!("-n {host} link set card up"))?;
            ip(&format!("-n {host} link set lo up"))?;
            let shape = format!("root tbf rate {bits_per_s}bit burst 256kb latency 100ms");
            run("tc", &format!("-n {host} qdisc add dev card {shape}"))?;
            run("tc", &format!("-n {switch} qdisc add dev port{number} {shape}"))?;
        }
        Ok(hosts)
    }

    fn switch(&self) -> String {
        format!("{}s", self.name)
    }

    /// A host's namespace.
    pub fn host(&self, number: usize) -> String {
        format!("{}h{number}", self.name)
    }

    /// A host's address.
    pub fn address(&self, number: usize) -> String {
        format!("10.78.0.{}", number + 1)
    }

    /// Bytes that a host's card has received and sent, headers included.
    pub fn traffic(&self, number: usize) -> Result<[u64; 2]> {
        let said = Command::new("ip").args(["netns", "exec", &self.host(number), "cat", "/proc/net/dev"]).output()?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let line = text.lines().find_map(|line| line.trim().strip_prefix("card:")).context("a host without a card")?;
        let fields: Vec<u64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        match fields[..] {
            [received, _, _, _, _, _, _, _, sent, ..] => Ok([received, sent]),
            _ => bail!("/proc/net/dev has another form: {line}"),
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let hosts = (0..self.count).map(|number| self.host(number));
        for namespace in hosts.chain([self.switch()]) {
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}

/// Removes the hosts of a run that was killed before it could.
fn remove_abandoned() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(rest) = name.strip_prefix("lerat") else { continue };
        let owner: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if !Path::new("/proc").join(owner).exists() {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(words: &str) -> Result<()> {
    run("ip", words)
}

/// Runs a program of the system.
pub fn run(program: &str, words: &str) -> Result<()> {
    let said = Command::new(program).args(words.split_whitespace()).output().with_context(|| program.to_owned())?;
    if said.status.success() {
        return Ok(());
    }
    bail!("`{program} {words}`: {}", String::from_utf8_lossy(&said.stderr).trim())
}
