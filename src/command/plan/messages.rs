//! What the ranks of a run will send each other in a step: every bucket's exchanges as the protocol lists them, by the
//! forecast of a link.

use std::fmt::Write;

use crate::comm::describe::{CollectivePlan, plan};
use crate::comm::{Choice, Collective, Link, Links};
use crate::parallel::agree::{Exchange, Protocol};
use crate::tensor::Plan as Planned;
use serde_json::{Value, json};

use crate::command::grouped;

/// What one bucket's exchange is.
struct Travel {
    bucket: usize,
    /// The node after which its gradients leave.
    leaves_after: usize,
    /// The node of the next forward pass before which its weights have to be there, where weights travel.
    needed_before: Option<usize>,
    plan: CollectivePlan,
}

/// The messages of a step.
pub struct Messages {
    workers: usize,
    link: (f64, f64),
    buckets: Vec<Travel>,
    /// Whether all gradients are kept, and leave when the whole batch is computed.
    at_end: bool,
    /// Sums that the step waits for: the node that makes each.
    sums: Vec<(usize, CollectivePlan)>,
}

impl Messages {
    /// Between so many workers, over links of so many seconds of latency and bytes per second.
    pub fn new(planned: &Planned, protocol: &Protocol, workers: usize, (latency_s, bytes_per_s): (f64, f64)) -> Self {
        let choice = Choice::by_cost(Links::uniform(workers, Link::new(latency_s, bytes_per_s)));
        let at_end = planned.stores_gradients();
        let last = planned.graph().nodes().len().saturating_sub(1);
        let travel = |bucket: usize, collective| {
            let found = &planned.buckets()[bucket];
            let leaves_after = if at_end { last } else { found.ready_after };
            let needed_before = (collective == Collective::AllGather).then_some(found.needed_before);
            let plan = plan(collective, &choice, found.elements.len(), size_of::<f32>());
            Travel { bucket, leaves_after, needed_before, plan }
        };
        let of = |exchange: &Exchange| match *exchange {
            Exchange::AllReduce { bucket } => Some(travel(bucket, Collective::AllReduce)),
            Exchange::ReduceScatter { bucket } => Some(travel(bucket, Collective::ReduceScatter)),
            Exchange::AllGather { bucket } => Some(travel(bucket, Collective::AllGather)),
            Exchange::Report | Exchange::PushPull { .. } => None,
        };
        let sum = |node, elements| (node, plan(Collective::AllReduce, &choice, elements, size_of::<f32>()));
        let of_node = |(node, sums): (usize, [usize; 2])| {
            sums.into_iter().filter(|&elements| elements > 0).map(move |elements| (node, elements))
        };
        let sums = planned.nodes_with_sums().flat_map(of_node).map(|(node, elements)| sum(node, elements)).collect();
        let buckets = protocol.in_step.iter().filter_map(of).collect();
        Self { workers, link: (latency_s, bytes_per_s), buckets, at_end, sums }
    }

    fn all(&self) -> impl Iterator<Item = &CollectivePlan> {
        self.buckets.iter().map(|travel| &travel.plan).chain(self.sums.iter().map(|(_, plan)| plan))
    }

    /// What all of them take, one after the other.
    pub fn seconds(&self) -> f64 {
        self.all().map(CollectivePlan::seconds).sum()
    }

    /// Bytes that a rank sends and receives in a step.
    pub fn bytes(&self, rank: usize) -> [u64; 2] {
        self.all().fold([0; 2], |[sent, received], plan| {
            let forecast = &plan.ranks[rank].forecast;
            [sent + forecast.sent_bytes as u64, received + forecast.received_bytes as u64]
        })
    }

    /// As text; with `details`, every transfer of every bucket.
    pub fn text(&self, details: bool) -> String {
        let (latency_s, bytes_per_s) = self.link;
        let mut text = format!(
            "\nmessages of a step between {} workers, over links of {:.0} µs and {:.2} Gbit/s: forecast {:.1} ms\n",
            self.workers,
            latency_s * 1e6,
            bytes_per_s * 8.0 / 1e9,
            self.seconds() * 1e3
        );
        for Travel { bucket, leaves_after, needed_before, plan } in &self.buckets {
            let bytes = grouped((plan.length * plan.element_bytes) as u64);
            let ms = plan.seconds() * 1e3;
            let when = match needed_before {
                _ if self.at_end => "after the backward pass".to_owned(),
                Some(node) => format!("needed by node {node:>6}"),
                None => format!("ready after node {leaves_after:>4}"),
            };
            let how = match plan.collective {
                Collective::AllReduce => plan.algorithm.to_string(),
                collective => format!("{collective} by {}", plan.algorithm),
            };
            let _ = writeln!(text, "  bucket {bucket:>3}  {when}  {bytes:>14} bytes  {how}  {ms:.2} ms");
            if details {
                plan.text(true).lines().skip(1).for_each(|line| {
                    let _ = writeln!(text, "    {line}");
                });
            }
        }
        if !self.sums.is_empty() {
            let bytes: usize = self.sums.iter().map(|(_, plan)| plan.length * plan.element_bytes).sum();
            let (count, ms) = (self.sums.len(), 1e3 * self.sums.iter().map(|(_, plan)| plan.seconds()).sum::<f64>());
            let bytes = grouped(bytes as u64);
            let _ = writeln!(
                text,
                "  statistics of batch-norm layers: {count} sums, {bytes} bytes, {ms:.2} ms that the step waits"
            );
        }
        for (node, plan) in self.sums.iter().filter(|_| details) {
            let (bytes, algorithm) = (grouped((plan.length * plan.element_bytes) as u64), plan.algorithm);
            let _ =
                writeln!(text, "    in node {node:>4}  {bytes:>8} bytes  {algorithm}  {:.2} ms", plan.seconds() * 1e3);
        }
        for rank in 0..self.workers {
            let [sent, received] = self.bytes(rank).map(grouped);
            let _ = writeln!(text, "  rank {rank}: {sent} bytes out, {received} in");
        }
        text
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let bucket = |Travel { bucket, leaves_after, needed_before, plan }: &Travel| {
            json!({
                "bucket": bucket,
                "collective": plan.collective.name(),
                "ready_after": leaves_after,
                "needed_before": needed_before,
                "bytes": plan.length * plan.element_bytes,
                "algorithm": plan.algorithm.to_string(),
                "forecast_s": plan.seconds(),
            })
        };
        let ranks: Vec<Value> = (0..self.workers)
            .map(|rank| {
                let [sent, received] = self.bytes(rank);
                json!({ "rank": rank, "sent_bytes": sent, "received_bytes": received })
            })
            .collect();
        let buckets: Vec<Value> = self.buckets.iter().map(bucket).collect();
        let sum = |(node, plan): &(usize, CollectivePlan)| json!({ "node": node, "bytes": plan.length * plan.element_bytes, "forecast_s": plan.seconds() });
        let sums: Vec<Value> = self.sums.iter().map(sum).collect();
        json!({
            "workers": self.workers,
            "after_backward": self.at_end,
            "forecast_s": self.seconds(),
            "buckets": buckets,
            "sums": sums,
            "ranks": ranks,
        })
    }
}
