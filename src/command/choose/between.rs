//! Several nodes or the best of them alone: what `choose --nodes N` or `--hosts A,B` says, and what `train --hosts A,B --split auto` does.
//!
//! This node is measured, for the whole batch and for its share, and others are taken to be like it. The link is what was said, or what
//! `paceline doctor --hosts` measures.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::choose::between::{Decision, Gradients, Node};
use crate::choose::{Answer, Found, Request, choose, gradients};
use crate::cluster::spec::Hosts;
use crate::comm::Link;
use crate::failure::Failure;
use crate::output::note;
use crate::system::host;
use crate::train::Config;

/// A link that nobody has described or measured: Gigabit Ethernet.
const LATENCY_US: f64 = 50.0;
const BANDWIDTH_GBIT: f64 = 1.0;

/// Nodes that could train together, and the slowest link between them.
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    /// How many.
    pub count: usize,
    /// Between any two of them.
    pub link: Link,
}

impl Nodes {
    /// Of so many nodes, by what was said of the link: microseconds and Gbit/s.
    pub fn stated(count: usize, latency_us: Option<f64>, bandwidth_gbit: Option<f64>) -> Self {
        let bytes_per_s = bandwidth_gbit.unwrap_or(BANDWIDTH_GBIT) * 1e9 / 8.0;
        Self { count, link: Link::new(latency_us.unwrap_or(LATENCY_US) * 1e-6, bytes_per_s) }
    }

    /// The hosts that were typed, and what `doctor` finds between them; none if there is one.
    pub fn measured(hosts: &str, port: Option<u16>) -> Result<Option<Self>, Failure> {
        let mut names = Hosts::parse(hosts)?.by_rank();
        names.sort_unstable();
        names.dedup();
        if names.len() < 2 {
            return Ok(None);
        }
        note("measuring the links between the hosts, as paceline doctor does");
        let mut command = Command::new(host::own_program().map_err(Failure::failed)?);
        command.args(["doctor", "--json", "--hosts", &names.join(",")]).stdin(Stdio::null()).stderr(Stdio::inherit());
        command.args(port.map(|port| format!("--port={port}")));
        let output = command.output().map_err(Failure::failed)?;
        let found = serde_json::from_slice::<Value>(&output.stdout).ok().filter(|_| output.status.success());
        let found = found.ok_or_else(|| {
            Failure::failed("the links between the hosts could not be measured; doctor has said why above")
        })?;
        let slowest = slowest(&found).ok_or_else(|| Failure::failed("doctor found no link between the hosts"))?;
        Ok(Some(Self { count: names.len(), link: slowest }))
    }

    /// For people.
    fn words(&self) -> String {
        let Link { latency_s, seconds_per_byte } = self.link;
        format!("{} nodes, links of {:.0} µs and {:.2} Gbit/s", self.count, latency_s * 1e6, 8e-9 / seconds_per_byte)
    }
}

/// The slowest of what `doctor` has measured over one socket.
fn slowest(found: &Value) -> Option<Link> {
    let links = found["links"].as_array()?;
    let latency_s = links.iter().filter_map(|link| link["latency_s"].as_f64()).max_by(f64::total_cmp)?;
    let speeds = links.iter().filter_map(|link| link["bytes_per_s"]["1"].as_f64());
    Some(Link::new(latency_s, speeds.min_by(f64::total_cmp)?))
}

/// What was decided, and from what.
pub struct Decided {
    nodes: Nodes,
    decision: Decision,
    /// The set-up that a node has for its share.
    share: String,
}

/// What comparing nodes comes to.
pub enum Compared {
    /// There is an answer.
    Decided(Decided),
    /// The share could not be measured.
    Unknown,
    /// The user has asked for the end.
    Interrupted,
}

/// Whether these nodes together are faster than this one; `whole` is what this node's search for the whole batch has found.
pub fn decide(request: &Request<'_>, whole: &Found, nodes: Nodes) -> Result<Compared, Failure> {
    let config = Config { batch: request.config.batch.div_ceil(nodes.count), ..request.config.clone() };
    let share = match choose(&Request { config: &config, said: request.said.clone(), ..*request })? {
        Answer::Found(share) => share,
        Answer::NothingApplies(_) => return Ok(Compared::Unknown),
        Answer::Interrupted => return Ok(Compared::Interrupted),
    };
    let row = one_task(&share);
    let (Some(alone_s), Some(share_s)) = (whole.choice().step_s, row.step_s) else { return Ok(Compared::Unknown) };
    let Some(gradients): Option<Gradients> = gradients(&config, request.registry) else { return Ok(Compared::Unknown) };
    let decision = Decision::new(&vec![Node { alone_s, share_s }; nodes.count], gradients, nodes.link);
    Ok(Compared::Decided(Decided { nodes, decision, share: row.setup.clone() }))
}

/// The row of one process with all threads, which is what a node runs of several; else the choice.
fn one_task(share: &Found) -> &crate::choose::table::Row {
    let alone = share.rows.iter().filter(|row| row.step_s.is_some() && row.setup.starts_with("1 replica"));
    let fastest = alone.min_by(|one, other| one.step_s.unwrap_or(0.0).total_cmp(&other.step_s.unwrap_or(0.0)));
    fastest.unwrap_or(share.choice())
}

impl Decided {
    /// Whether all nodes are faster.
    pub fn distributes(&self) -> bool {
        self.decision.distributes()
    }

    /// For people: of what, what, and why.
    pub fn text(&self) -> String {
        let reason = self.decision.reason(self.nodes.count);
        format!("{}, each like this one with its share by {}: {reason}", self.nodes.words(), self.share)
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let Decision { together_s, alone, exchange_s, sent_bytes } = &self.decision;
        json!({
            "nodes": self.nodes.count,
            "latency_s": self.nodes.link.latency_s,
            "bytes_per_s": 1.0 / self.nodes.link.seconds_per_byte,
            "share": self.share,
            "together_s": together_s,
            "alone_s": alone.1,
            "exchange_s": exchange_s,
            "sent_bytes": sent_bytes,
            "distributes": self.distributes(),
            "reason": self.decision.reason(self.nodes.count),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_link_counts() {
        let link = |latency_s: f64, speed: f64| json!({"latency_s": latency_s, "bytes_per_s": {"1": speed, "8": 9e9}});
        let found = json!({"links": [link(1e-4, 1e8), link(2e-4, 2e8), link(1e-5, 3e8)]});
        assert_eq!(slowest(&found), Some(Link::new(2e-4, 1e8)));
        assert_eq!(slowest(&json!({"links": []})), None);
    }

    #[test]
    fn one_host_has_no_link() {
        assert!(Nodes::measured("a:2", None).is_ok_and(|nodes| nodes.is_none()));
        let stated = Nodes::stated(4, None, Some(10.0));
        assert_eq!(stated.words(), "4 nodes, links of 50 µs and 10.00 Gbit/s");
    }
}
