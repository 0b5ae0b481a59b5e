//! Several nodes or the best of them alone. Each node measures itself, for the whole batch and for its share. Nodes that have met
//! (`--hosts`, or the variables of a launcher that has started a process on each) tell each other and come to the same decision; of
//! `choose --nodes N` all are imagined to be like this one.

use std::time::Duration;

use serde_json::{Value, json};

use crate::choose::apply::Said;
use crate::choose::between::{Decision, Exchange, Gradients, Node};
use crate::choose::table::Row;
use crate::choose::{Answer, Found, Request, choose, gradients};
use crate::cluster::Member;
use crate::comm::{Link, Links};
use crate::failure::Failure;
use crate::run::team::{Meeting, Team};
use crate::train::Config;
use crate::train::compute::Compute;
use crate::train::together::{Carry, Sharding, Split};

/// A link that nobody has described: Gigabit Ethernet.
const LATENCY_US: f64 = 50.0;
const BANDWIDTH_GBIT: f64 = 1.0;

/// What this node has measured of itself.
pub struct Own {
    /// For the whole batch; every set-up with why it does not apply, where none does.
    pub whole: Result<Found, Vec<Row>>,
    /// For its share of it, by one task.
    share: Option<Row>,
}

impl Own {
    /// What others are told: a node that cannot takes forever.
    fn node(&self) -> Node {
        let whole_s = self.whole.as_ref().ok().and_then(|whole| whole.choice().step_s);
        let share_s = self.share.as_ref().and_then(|share| share.step_s);
        Node { alone_s: whole_s.unwrap_or(f64::INFINITY), share_s: share_s.unwrap_or(f64::INFINITY) }
    }

    /// Threads that it takes for its share.
    fn share_threads(&self) -> usize {
        let flags = self.share_flags();
        let threads = flags.iter().position(|flag| flag == "--threads").and_then(|at| flags.get(at + 1));
        threads.and_then(|threads| threads.parse().ok()).unwrap_or(1)
    }

    /// What to type on this node for its share; how many workers there are follows from the nodes.
    pub fn share_flags(&self) -> Vec<String> {
        let flags = self.share.as_ref().map_or(&[][..], |share| &share.flags[..]);
        flags.chunks(2).filter(|flag| flag[0] != "--workers").flatten().cloned().collect()
    }
}

/// Measures this node as one of so many, with half of the time for each of both; none if the user has asked for the end.
pub fn measure(request: &Request<'_>, nodes: usize) -> Result<Option<Own>, Failure> {
    let whole = match choose(&Request { said: request.said.clone(), budget_s: request.budget_s / 2.0, ..*request })? {
        Answer::Found(found) => Ok(found),
        Answer::NothingApplies(rows) => Err(rows),
        Answer::Interrupted => return Ok(None),
    };
    let config = Config { batch: request.config.batch.div_ceil(nodes), ..request.config.clone() };
    let said = Said { one_task: true, workers: None, carry: None, shard: None, ..request.said.clone() };
    let share = match choose(&Request { config: &config, said, budget_s: request.budget_s / 2.0, ..*request })? {
        Answer::Found(share) => Some(share.choice().clone()),
        Answer::NothingApplies(_) => None,
        Answer::Interrupted => return Ok(None),
    };
    Ok(Some(Own { whole, share }))
}

/// What was decided, and from what.
pub struct Decided {
    /// The nodes, in words.
    nodes: String,
    /// What each takes.
    figures: Vec<Node>,
    /// The slowest link between them.
    link: Link,
    decision: Decision,
}

/// Decides for so many nodes like this one, by what was said of the links: microseconds and Gbit/s. None where too little is known.
pub fn imagine(
    (request, own): (&Request<'_>, &Own),
    count: usize,
    (latency_us, bandwidth_gbit): (Option<f64>, Option<f64>),
) -> Option<Decided> {
    let bytes_per_s = bandwidth_gbit.unwrap_or(BANDWIDTH_GBIT) * 1e9 / 8.0;
    let link = Link::new(latency_us.unwrap_or(LATENCY_US) * 1e-6, bytes_per_s);
    let gradients = gradients(request.config, request.registry)?;
    let share = own.share.as_ref()?;
    let nodes = format!("{count} nodes, each like this one with its share by {}", share.setup);
    Decided::new(nodes, vec![own.node(); count], &Exchange::by_links(gradients, &Links::uniform(count, link)), link)
}

/// Meets the other nodes and tells them what was measured here; all come to the same decision. None where the ranks share machines, or no
/// node can train the model whole.
pub fn confer(
    (request, own): (&Request<'_>, &Own),
    member: Member,
    meeting: &Meeting,
) -> Result<Option<Decided>, Failure> {
    let mut deadlines = request.config.deadlines;
    // What one node has kept, another measures.
    deadlines.gather += Duration::from_secs_f64(1.5 * request.budget_s);
    let config = Config {
        split: Split::Replicate,
        workers: member.world,
        carry: Carry::AUTO,
        algorithm: None,
        shard: Sharding::None,
        device: Compute::Cpu,
        sync_batch_norm: false,
        accumulate: 1,
        deadlines,
        ..request.config.clone()
    };
    let is_first = member.rank.index() == 0;
    let met = Team::meet(member, meeting, &config, request.stop);
    let team = met.map_err(|failure| failure.for_all(is_first))?;
    let Node { alone_s, share_s } = own.node();
    let told = team.gather(&[alone_s as f32, share_s as f32])?;
    let (links, hosts) = (team.links(), team.hosts());
    let one_each = links.nodes.groups().len() == hosts.len();
    let gradients = gradients(request.config, request.registry).filter(|_| one_each);
    let exchange = gradients.map(|gradients| exchange(&team, gradients, &links, own.share_threads())).transpose()?;
    team.finish()?;
    let Some(exchange) = exchange else { return Ok(None) };
    let node = |told: &[f32]| Node { alone_s: f64::from(told[0]), share_s: f64::from(told[1]) };
    let figures: Vec<Node> = told.chunks(2).map(node).collect();
    let each: Vec<String> = hosts.iter().zip(&figures).map(|(host, node)| format!("{host} {}", words(node))).collect();
    let nodes = format!("{} nodes ({})", hosts.len(), each.join("; "));
    Ok(Decided::new(nodes, figures, &exchange, links.between))
}

/// Gradients that are sent for real, as many as travel in this time; of others it follows.
const SENT_S: f64 = 0.4;

/// Adds up numbers as gradients are, and sees how long that takes and what it costs the cores, of which a share has so many threads.
fn exchange(team: &Team, gradients: Gradients, links: &Links, threads: usize) -> Result<Exchange, Failure> {
    let expected = Exchange::by_links(gradients, links);
    let part = (SENT_S / expected.all_s.max(1e-9)).min(1.0);
    let elements = ((gradients.elements as f64 * part) as usize).max(1);
    let (took_s, cpu_s) = team.rehearse_sum(elements)?;
    let told = team.gather(&[took_s as f32, (cpu_s / threads.max(1) as f64) as f32])?;
    let most = |at: usize| f64::from(told.chunks(2).map(|told| told[at]).fold(0.0, f32::max));
    let scale = gradients.elements as f64 / elements as f64;
    Ok(Exchange { all_s: scale * most(0), busy_s: scale * most(1), ..expected })
}

/// A node for people.
fn words(Node { alone_s, share_s }: &Node) -> String {
    let ms = |seconds: &f64| match seconds.is_finite() {
        true => format!("{:.1} ms", seconds * 1e3),
        false => "never".to_owned(),
    };
    format!("{} alone, {} for its share", ms(alone_s), ms(share_s))
}

impl Decided {
    fn new(nodes: String, figures: Vec<Node>, exchange: &Exchange, link: Link) -> Option<Self> {
        let decision = Decision::new(&figures, exchange);
        let is_possible = decision.alone.1.is_finite() || decision.together_s.is_finite();
        is_possible.then_some(Self { nodes, figures, link, decision })
    }

    /// Whether all nodes together are faster than the best of them.
    pub fn distributes(&self) -> bool {
        self.decision.distributes()
    }

    /// The node that is best alone.
    pub fn best(&self) -> usize {
        self.decision.alone.0
    }

    /// For people: of what, what, and why.
    pub fn text(&self) -> String {
        let Link { latency_s, seconds_per_byte } = self.link;
        let links = format!("links of {:.0} µs and {:.2} Gbit/s", latency_s * 1e6, 8e-9 / seconds_per_byte);
        format!("{}, {links}: {}", self.nodes, self.decision.reason(self.figures.len()))
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let Decision { together_s, alone, exchange_s, sent_bytes } = &self.decision;
        let figures = self.figures.iter().map(|node| json!({"alone_s": node.alone_s, "share_s": node.share_s}));
        json!({
            "nodes": figures.collect::<Vec<_>>(),
            "latency_s": self.link.latency_s,
            "bytes_per_s": 1.0 / self.link.seconds_per_byte,
            "together_s": together_s,
            "alone_s": alone.1,
            "best": alone.0,
            "exchange_s": exchange_s,
            "sent_bytes": sent_bytes,
            "distributes": self.distributes(),
            "reason": self.decision.reason(self.figures.len()),
        })
    }
}
