//! Which agreement is expected to be fastest between so many workers: a step's computing and messages by each, over the link that is
//! planned for. The arithmetic is in `parallel/src/forecast.rs`.

use std::fmt::Write;

use crate::comm::{Algorithm, Choice, Link, Links};
use crate::parallel::agree::{Rounds, Shape, Steps};
use crate::parallel::forecast::{BucketTimes, Forecast, StepTimes, Traffic, Way, Workers};
use crate::tensor::Plan as Planned;
use crate::tensor::device::null::CostModel;
use crate::tensor::plan::Bucket;
use crate::train::Config;
use crate::train::together::{Agree, Sharding};
use serde_json::{Value, json};

use crate::command::grouped;

/// What is said of agreements under which workers do not make the steps of one process.
const ANOTHER: &str = ": another training";

/// Where the times of a step's nodes are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// They were measured.
    Measured,
    /// They follow from arithmetic and memory traffic on an imagined device.
    Imagined,
}

impl Source {
    const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Imagined => "arithmetic",
        }
    }

    fn text(self) -> String {
        let CostModel { flops_per_s, bytes_per_s, .. } = CostModel::TWO_SERVER_CORES;
        match self {
            Self::Measured => "measured on this machine".into(),
            Self::Imagined => format!(
                "of a device of {:.0} GFLOP/s and {:.0} GB/s; --balance time measures this machine",
                flops_per_s / 1e9,
                bytes_per_s / 1e9
            ),
        }
    }
}

/// All ways, the fastest first, and those that the run could not go.
pub struct Agreements {
    compute_s: f64,
    source: Source,
    ranked: Vec<(String, Forecast)>,
    refused: Vec<(String, String)>,
}

impl Agreements {
    /// For the steps of a plan whose nodes take these seconds, or those of an imagined device; the whole step is `parts` of them.
    pub fn new(
        planned: &Planned,
        config: &Config,
        measured: Option<&[f64]>,
        (latency_s, bytes_per_s): (f64, f64),
    ) -> Self {
        let link = Link::new(latency_s, bytes_per_s);
        let choice = Choice::by_cost(Links::uniform(config.workers, link));
        let workers = Workers { count: config.workers, link, choice };
        let times = times(planned, config.accumulate, measured);
        let (mut ranked, mut refused) = (Vec::new(), Vec::new());
        for choosable in choosable(config) {
            match choosable.refusal(config) {
                Some(why) => refused.push((choosable.name, why)),
                None => ranked.push((choosable.name, workers.forecast(choosable.way, &times))),
            }
        }
        ranked.sort_by(|(_, a), (_, b)| a.step_s.total_cmp(&b.step_s));
        let source = if measured.is_some() { Source::Measured } else { Source::Imagined };
        Self { compute_s: times.compute_s, source, ranked, refused }
    }

    /// The two fastest of those that train alike.
    fn first_two(&self) -> Option<[&(String, Forecast); 2]> {
        let mut alike = self.ranked.iter().filter(|(name, _)| !name.ends_with(ANOTHER));
        Some([alike.next()?, alike.next()?])
    }

    /// How many times as long the second takes.
    fn lead(&self) -> Option<f64> {
        let [(_, first), (_, second)] = self.first_two()?;
        Some(second.step_s / first.step_s)
    }

    /// As text.
    pub fn text(&self) -> String {
        let mut text = format!(
            "\nagreements, by expected seconds of a step with messages beside computing ({:.3} s of that, {})\n",
            self.compute_s,
            self.source.text()
        );
        let width = self.ranked.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, Forecast { step_s, waits_s, machines, algorithms, worker, server }) in &self.ranked {
            let by = algorithms.iter().map(Algorithm::to_string).collect::<Vec<_>>().join(", ");
            let by = if by.is_empty() { by } else { format!("; by {by}") };
            let traffic = |Traffic { sent, received }: &Traffic| {
                format!("{} bytes out, {} in", grouped(*sent), grouped(*received))
            };
            let of_server =
                server.as_ref().map_or(String::new(), |server| format!("; each server {}", traffic(server)));
            let _ = writeln!(
                text,
                "  {name:<width$}  {step_s:>8.3} s, {waits_s:.3} of them waiting; {machines} machines{by}; each worker {}{of_server}",
                traffic(worker)
            );
        }
        for (name, why) in &self.refused {
            let _ = writeln!(text, "  {name}: not in this run: {why}");
        }
        if let (Some(lead), Some([(first, _), (second, _)])) = (self.lead(), self.first_two()) {
            let _ = match lead < 1.005 {
                true => writeln!(text, "  {first} and {second} are expected to be equally fast"),
                false => writeln!(text, "  {first} is expected to be fastest, {lead:.2}× as fast as {second}"),
            };
        }
        text
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let traffic = |Traffic { sent, received }: &Traffic| json!({"sent_bytes": sent, "received_bytes": received});
        let ranked = self.ranked.iter().map(|(name, forecast)| {
            json!({
                "agreement": name, "step_s": forecast.step_s, "waits_s": forecast.waits_s, "machines": forecast.machines,
                "algorithms": forecast.algorithms.iter().map(Algorithm::to_string).collect::<Vec<_>>(),
                "worker": traffic(&forecast.worker), "server": forecast.server.as_ref().map(traffic),
            })
        });
        let refused = self.refused.iter().map(|(name, why)| json!({"agreement": name, "why": why}));
        json!({
            "compute_s": self.compute_s,
            "source": self.source.name(),
            "ranked": ranked.collect::<Vec<_>>(),
            "refused": refused.collect::<Vec<_>>(),
            "lead": self.lead(),
        })
    }
}

/// A way, the agreement that goes it, and what both are called.
struct Choosable {
    way: Way,
    agree: Agree,
    name: String,
}

/// What there is to choose from: an agreement without servers has the machines of the workers, one with servers has several ways.
fn choosable(config: &Config) -> Vec<Choosable> {
    let count = config.workers;
    let servers = |count: usize| if count == 1 { "1 server".to_owned() } else { format!("{count} servers") };
    let of = |(name, _): (&'static str, _)| {
        let agree: Agree = name.parse().expect("it is the name of an agreement");
        let one = |way, name| Choosable { way, agree, name };
        let own = Config { agree, ..config.clone() };
        let steps = agree.recipe().protocol(&Shape::default(), &own.agreement(false)).steps;
        if let Steps::Local { rounds: Some(Rounds { every: Some(every), .. }) } = steps {
            return vec![one(Way::Rounds(every), format!("{name}, weights every {every} steps{ANOTHER}"))];
        }
        if let Steps::Center { every } | Steps::Groups { every } = steps {
            return vec![one(
                Way::Center(every),
                format!("{name}, {} on a machine of its own, beside steps{ANOTHER}", servers(1)),
            )];
        }
        // An epoch of it is a step.
        if steps == Steps::Gathered {
            return Vec::new();
        }
        match (agree.recipe().has_servers(), config.shard) {
            (false, Sharding::None) => vec![one(Way::AllReduce, name.to_owned())],
            (false, Sharding::Optimizer) => vec![one(Way::Sharded, format!("{name}, sharded optimizer"))],
            (true, _) => vec![
                one(Way::Servers(1), format!("{name}, {} on a machine of its own", servers(1))),
                one(Way::ServersBeside, format!("{name}, {} beside the workers", servers(count))),
                one(Way::Servers(count), format!("{name}, {} on machines of their own", servers(count))),
            ],
        }
    };
    // Between threads of one process there is no link.
    let has_links = |agree: &Agree| !agree.recipe().shares_process();
    Agree::all().flat_map(of).filter(|choosable| has_links(&choosable.agree)).collect()
}

impl Choosable {
    /// Why the run cannot agree so.
    fn refusal(&self, config: &Config) -> Option<String> {
        let servers = match self.way {
            Way::AllReduce | Way::Sharded | Way::Rounds(_) | Way::Center(_) => config.servers,
            Way::Servers(servers) => servers,
            Way::ServersBeside => config.workers,
        };
        let run = Config { agree: self.agree, servers, ..config.clone() };
        run.check().err().map(|error| error.to_string())
    }
}

/// When the buckets of a step are final and needed. Parts of a batch before the last have none that leave.
fn times(planned: &Planned, parts: usize, measured: Option<&[f64]>) -> StepTimes {
    let graph = planned.graph();
    let device = CostModel::TWO_SERVER_CORES;
    let mut before = vec![0.0];
    for (index, node) in graph.nodes().iter().enumerate() {
        let took = measured.map_or_else(|| device.node_seconds(graph, node), |seconds| seconds[index]);
        before.push(before[index] + took);
    }
    let part_s = before[graph.nodes().len()];
    let (earlier_s, compute_s) = (part_s * (parts - 1) as f64, part_s * parts as f64);
    let at_end = planned.stores_gradients();
    let of = |bucket: &Bucket| BucketTimes {
        ready_s: if at_end { compute_s } else { earlier_s + before[bucket.ready_after + 1] },
        needed_s: if at_end { 0.0 } else { before[bucket.needed_before.min(graph.nodes().len())] },
        elements: bucket.elements.len(),
    };
    StepTimes { compute_s, buckets: planned.buckets().iter().map(of).collect() }
}
