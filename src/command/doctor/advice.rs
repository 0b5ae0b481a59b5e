//! From what was measured to settings: how many processes with how many threads, how many sockets, which carry, which
//! all-reduce at which size. The commands can be typed as they are.

use crate::comm::{Choice, Links, Nodes};
use serde_json::{Value, json};

use super::links::{Found, SOCKETS};

/// A number of sockets is worth its connections if the next ones add less than this share.
const WORTH: f64 = 0.95;

/// Samples of each worker's step in the commands.
const SAMPLES: usize = 32;

/// What to type.
#[derive(Debug)]
pub struct Advice {
    workers: usize,
    threads: usize,
    sockets: u16,
    carry: &'static str,
    collectives: String,
    commands: Vec<String>,
    /// On one machine: what finds out whether several replicas are faster than one with as many threads.
    compare: Option<String>,
}

/// Settings for these machines and links; hosts as they were typed.
pub fn from(machines: &[Value], found: &Found, hosts: Option<&str>) -> Advice {
    let least = |name: &str| machines.iter().filter_map(|machine| machine[name].as_u64()).min().unwrap_or(1) as usize;
    // A process for each NUMA node keeps its memory near; more on one node move the weights' updates twice over its bus.
    let per_machine = least("numa_nodes").max(1);
    let threads = (least("threads_usable") / per_machine).max(1);
    let (count, several) = (machines.len().max(1), machines.len() > 1);
    let workers = per_machine * count;
    let sockets = if several { sockets(found) } else { 1 };
    let carry = if several { "tcp" } else { "shm" };
    let nodes = Nodes::new((0..workers).map(|rank| (rank / per_machine) as u32).collect());
    let collectives = match several {
        true => Choice::by_cost(Links { nodes, ..found.links.clone() }).to_string(),
        false => "direct at any size, through shared memory".into(),
    };
    let mut train = format!("paceline train --batch {} --threads {threads}", SAMPLES * workers);
    if several {
        let hosts = hosts.map_or_else(|| "HOSTS".to_owned(), |hosts| with_processes(hosts, per_machine));
        train += &format!(" --hosts {hosts} --carry {carry} --sockets {sockets}");
    } else {
        train += &format!(" --workers {workers}");
        train += if workers > 1 { " --carry shm" } else { "" };
    }
    let link = if several { found.links.between } else { found.links.within };
    let plan = format!(
        "paceline plan --batch {} --workers {workers} --link-latency {:.1} --link-bandwidth {:.2}",
        SAMPLES * workers,
        link.latency_s * 1e6,
        8e-9 / link.seconds_per_byte
    );
    let commands = if workers > 1 { vec![train, plan] } else { vec![train] };
    let cores = workers * threads;
    let compare = (!several && cores > 1).then(|| format!("paceline bench scaling --workers {cores} --threads 1"));
    Advice { workers, threads, sockets, carry, collectives, commands, compare }
}

/// The least sockets with which the slowest link is about as fast as with any.
fn sockets(found: &Found) -> u16 {
    let slowest = |index: usize| found.rows.iter().map(|row| row.bytes_per_s[index].1).fold(f64::INFINITY, f64::min);
    let speeds: Vec<f64> = (0..SOCKETS.len()).map(slowest).collect();
    let best = speeds.iter().copied().fold(0.0, f64::max);
    SOCKETS[speeds.iter().position(|&speed| speed >= WORTH * best).unwrap_or(0)]
}

/// `a,b` with so many processes on each.
fn with_processes(hosts: &str, processes: usize) -> String {
    let names = hosts.split(',').map(|host| host.split(':').next().unwrap_or(host).trim());
    let suffix = if processes > 1 { format!(":{processes}") } else { String::new() };
    names.map(|name| format!("{name}{suffix}")).collect::<Vec<_>>().join(",")
}

impl Advice {
    /// For scripts.
    pub fn to_json(&self) -> Value {
        json!({
            "workers": self.workers,
            "threads": self.threads,
            "sockets": self.sockets,
            "carry": self.carry,
            "collectives": self.collectives,
            "commands": self.commands,
            "compare": self.compare,
        })
    }

    /// For people.
    pub fn lines(&self) -> String {
        let workers = if self.workers == 1 { "1 worker".to_owned() } else { format!("{} workers", self.workers) };
        let threads = if self.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", self.threads) };
        let mut text = format!("advice    {workers} with {threads} each");
        if self.workers > 1 {
            text += &format!(", carry {}", self.carry);
            text += &if self.carry == "tcp" { format!(", sockets {}", self.sockets) } else { String::new() };
            text += &format!("; all-reduce {}", self.collectives);
        }
        text.push('\n');
        for command in &self.commands {
            text += &format!("          {command}\n");
        }
        if let Some(compare) = &self.compare {
            text +=
                &format!("          one replica with all threads, replicas in one process, or processes? {compare}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use crate::comm::Link;

    use super::super::links::Row;
    use super::*;

    fn found(speeds: &[[f64; 4]]) -> Found {
        let row = |speeds: &[f64; 4]| Row {
            name: "a → b".into(),
            carry: "tcp",
            latency_s: 5e-5,
            bytes_per_s: SOCKETS.into_iter().zip(*speeds).collect(),
        };
        let link = Link::new(5e-5, 1.25e8);
        Found { rows: speeds.iter().map(row).collect(), links: Links::uniform(2, link) }
    }

    #[test]
    fn sockets_are_as_few_as_do_for_the_slowest_link() {
        assert_eq!(sockets(&found(&[[100.0, 101.0, 102.0, 103.0]])), 1);
        assert_eq!(sockets(&found(&[[100.0, 190.0, 300.0, 310.0], [500.0; 4]])), 4);
    }

    #[test]
    fn two_machines_of_two_nodes_get_four_workers() {
        let machine = json!({"numa_nodes": 2, "threads_usable": 16});
        let advice = from(&[machine.clone(), machine], &found(&[[1e8, 2e8, 2e8, 2e8]]), Some("a,b:1"));
        assert_eq!((advice.workers, advice.threads, advice.sockets, advice.carry), (4, 8, 2, "tcp"));
        assert_eq!(
            advice.commands[0],
            "paceline train --batch 128 --threads 8 --hosts a:2,b:2 --carry tcp --sockets 2"
        );
        assert!(advice.commands[1].contains("--link-latency 50.0 --link-bandwidth 1.00"), "{}", advice.commands[1]);
        assert!(advice.collectives.contains("above "), "{}", advice.collectives);
    }
}
