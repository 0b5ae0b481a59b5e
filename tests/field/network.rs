//! Hosts on one machine: network namespaces, each with a cable to a switch, on which the kernel lets so many bits
//! through a second.

use std::process::{Command, Output};

use paceline::comm::Token;

use crate::ground::{Done, Ground, PATIENCE, Running, skip};

/// Hosts, removed at the end.
pub struct Network {
    name: String,
    hosts: usize,
}

/// Whether a host's cable is of a set speed.
#[derive(Clone, Copy, Debug)]
pub struct Cable {
    /// Bits a second, both ways; none for as many as the machine can.
    pub rate: Option<u64>,
    /// The largest packet.
    pub mtu: u32,
}

impl Network {
    /// So many hosts, or none where the machine does not allow them; then says that `test` is skipped.
    pub fn new(hosts: usize, cable: Cable, test: &str) -> Option<Self> {
        let network = Self { name: format!("paceline-{}", std::process::id()), hosts };
        match network.build(cable) {
            Ok(()) => Some(network),
            Err(reason) => {
                skip(test, &reason);
                None
            }
        }
    }

    fn build(&self, Cable { rate, mtu }: Cable) -> Result<(), String> {
        let switch = self.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add switch mtu {mtu} type bridge"))?;
        ip(&format!("-n {switch} link set switch up"))?;
        for number in 0..self.hosts {
            let host = self.host(number);
            ip(&format!("netns add {host}"))?;
            let (card, port) = (format!("-n {host} link"), format!("-n {switch} link"));
            ip(&format!("{card} add card mtu {mtu} type veth peer name port{number} mtu {mtu} netns {switch}"))?;
            ip(&format!("{port} set port{number} master switch up"))?;
            ip(&format!("-n {host} address add {}/24 dev card", address(number)))?;
            ip(&format!("{card} set card up"))?;
            ip(&format!("{card} set lo up"))?;
            if let Some(rate) = rate {
                let shape = format!("root tbf rate {rate}bit burst 256kb latency 100ms");
                run("tc", &format!("-n {host} qdisc add dev card {shape}"))?;
                run("tc", &format!("-n {switch} qdisc add dev port{number} {shape}"))?;
            }
        }
        Ok(())
    }

    /// Bytes that a host has sent over its cable, packets and all.
    pub fn sent_bytes(&self, host: usize) -> u64 {
        let words = format!("netns exec {} cat /sys/class/net/card/statistics/tx_bytes", self.host(host));
        let output = Command::new("ip").args(words.split_whitespace()).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn host(&self, number: usize) -> String {
        format!("{}-{number}", self.name)
    }

    /// Starts one process of a command on each of these hosts, ranks in their order, and waits until all have ended well.
    pub fn run(
        &self,
        ground: &Ground,
        hosts: impl Iterator<Item = usize> + Clone,
        words: &str,
        more: &[(&str, &str)],
    ) -> Vec<Done> {
        let (token, world) = (Token::random().to_hex(), hosts.clone().count().to_string());
        let first = hosts.clone().next().unwrap();
        let start = |(rank, number): (usize, usize)| {
            let mut command = ground.command(&format!("ip netns exec {} {words}", self.host(number)));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", &world).env("PACELINE_TOKEN", &token);
            command.env("MASTER_ADDR", address(first)).env("MASTER_PORT", "29400").envs(more.iter().copied());
            ground.start(&mut command, &format!("rank-{rank}.txt"))
        };
        let running: Vec<Running> = hosts.enumerate().map(start).collect();
        let done: Vec<Done> = running.into_iter().map(|process| process.ends(PATIENCE)).collect();
        for (rank, done) in done.iter().enumerate() {
            assert!(done.status.success(), "rank {rank} of {words}: {}\n{}", done.status, done.said);
        }
        done
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let hosts = (0..self.hosts).map(|number| self.host(number));
        for namespace in hosts.chain([self.switch()]) {
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}

fn address(number: usize) -> String {
    format!("10.77.0.{}", number + 1)
}

fn ip(words: &str) -> Result<(), String> {
    run("ip", words)
}

fn run(program: &str, words: &str) -> Result<(), String> {
    let said = |output: Output| match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned()),
    };
    let ended = Command::new(program).args(words.split_whitespace()).output().map_err(|error| error.to_string());
    ended.and_then(said).map_err(|why| format!("`{program} {words}`: {why}"))
}
