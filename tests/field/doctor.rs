//! `paceline doctor` between hosts whose cables have a known speed: it measures that speed.

use serde_json::Value;

use crate::ground::{Ground, has, say};
use crate::network::{Cable, Network};

const RATE: u64 = 400_000_000;

/// Of a packet of 1514 bytes on the cable 1448 are the sender's.
const PAYLOAD: f64 = 1448.0 / 1514.0;

/// How far a measurement may be from the cable's speed, and how often one is made again that other work has disturbed.
const TOLERANCE: f64 = 0.05;
const ATTEMPTS_MAX: usize = 3;

#[test]
#[ignore = "cargo x ci: field"]
fn a_shaped_link_is_measured_as_it_is() {
    let test = "a_shaped_link_is_measured_as_it_is";
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let Some(network) = Network::new(2, Cable { rate: Some(RATE), mtu: 1500 }, test) else { return };
    let mut worst = f64::INFINITY;
    for _ in 0..ATTEMPTS_MAX {
        let done = network.run(&ground, 0..2, "PACELINE doctor --json", &[]);
        let line = done[0].said.lines().find(|line| line.starts_with('{')).expect("rank 0 speaks");
        assert!(!done[1].said.contains('{'), "only rank 0 speaks: {}", done[1].said);
        let found: Value = serde_json::from_str(line).unwrap();
        let links = found["links"].as_array().unwrap();
        assert_eq!(links.len(), 2, "{line}");
        assert_eq!(found["machines"].as_array().unwrap().len(), 2, "{line}");
        let shares: Vec<f64> = links
            .iter()
            .flat_map(|link| ["1", "2", "4", "8"].map(|sockets| link["bytes_per_s"][sockets].as_f64().unwrap()))
            .map(|bytes_per_s| 8.0 * bytes_per_s / RATE as f64 / PAYLOAD)
            .collect();
        let advice = &found["advice"];
        assert!(advice["carry"] == "tcp" && advice["workers"].as_u64() >= Some(2), "{advice}");
        worst = shares.iter().map(|share| (share - 1.0).abs()).fold(0.0, f64::max);
        say(&format!("doctor on a cable of 400 Mbit/s, both ways, 1, 2, 4 and 8 sockets: {shares:.3?} of what fits"));
        if worst <= TOLERANCE {
            break;
        }
    }
    assert!(worst <= TOLERANCE, "a measurement is off by {:.1} %", 100.0 * worst);
}
