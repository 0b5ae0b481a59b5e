//! What the ranks of a run will send each other in a step: every bucket's all-reduce, by the forecast of a link.

use std::fmt::Write;

use paceline::comm::describe::{CollectivePlan, plan};
use paceline::comm::{Choice, Collective, Link, Links};
use paceline::tensor::Plan as Planned;
use serde_json::{Value, json};

use crate::command::grouped;

/// The all-reduces of a step.
pub struct Messages {
    workers: usize,
    link: (f64, f64),
    buckets: Vec<(usize, CollectivePlan)>,
}

impl Messages {
    /// Between so many workers, over links of so many seconds of latency and bytes per second.
    pub fn new(planned: &Planned, workers: usize, (latency_s, bytes_per_s): (f64, f64)) -> Self {
        let choice = Choice::by_cost(Links::uniform(workers, Link::new(latency_s, bytes_per_s)));
        let of = |bucket: &paceline::tensor::plan::Bucket| {
            let elements = bucket.elements.len();
            (bucket.ready_after, plan(Collective::AllReduce, &choice, elements, size_of::<f32>()))
        };
        Self { workers, link: (latency_s, bytes_per_s), buckets: planned.buckets().iter().map(of).collect() }
    }

    fn seconds(&self) -> f64 {
        self.buckets.iter().map(|(_, plan)| plan.seconds()).sum()
    }

    /// Bytes that a rank sends and receives in a step.
    fn bytes(&self, rank: usize) -> [u64; 2] {
        self.buckets.iter().fold([0; 2], |[sent, received], (_, plan)| {
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
        for (index, (ready_after, plan)) in self.buckets.iter().enumerate() {
            let bytes = grouped((plan.length * plan.element_bytes) as u64);
            let (algorithm, ms) = (plan.algorithm, plan.seconds() * 1e3);
            let _ = writeln!(
                text,
                "  bucket {index:>3}  ready after node {ready_after:>4}  {bytes:>14} bytes  {algorithm}  {ms:.2} ms"
            );
            if details {
                plan.text(true).lines().skip(1).for_each(|line| {
                    let _ = writeln!(text, "    {line}");
                });
            }
        }
        for rank in 0..self.workers {
            let [sent, received] = self.bytes(rank).map(grouped);
            let _ = writeln!(text, "  rank {rank}: {sent} bytes out, {received} in");
        }
        text
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let bucket = |(ready_after, plan): &(usize, CollectivePlan)| {
            json!({
                "ready_after": ready_after,
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
        json!({ "workers": self.workers, "forecast_s": self.seconds(), "buckets": buckets, "ranks": ranks })
    }
}
