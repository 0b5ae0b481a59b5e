//! Six hosts train as one process, and a seventh serves parameters to them.

use crate::ground::{Ground, TRAIN, has};
use crate::network::{Cable, Network};

const CABLE: Cable = Cable { rate: None, mtu: 1500 };

#[test]
fn six_hosts_train_as_one_process_by_all_reduce() {
    let test = "six_hosts_train_as_one_process_by_all_reduce";
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let Some(network) = Network::new(6, CABLE, test) else { return };
    network.run(&ground, 0..6, &format!("PACELINE {TRAIN}"), &[]);
    ground.same_as_one_process(&ground.unnamed_run(), 6);
}

#[test]
fn three_hosts_train_in_secret_as_one_process() {
    let test = "three_hosts_train_in_secret_as_one_process";
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let Some(network) = Network::new(3, CABLE, test) else { return };
    network.run(&ground, 0..3, &format!("PACELINE {TRAIN} --tls --sockets 2 --run run"), &[]);
    ground.same_as_one_process("run", 3);
}

#[test]
fn six_hosts_train_as_one_process_by_a_server_on_the_seventh() {
    let test = "six_hosts_train_as_one_process_by_a_server_on_the_seventh";
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let Some(network) = Network::new(7, CABLE, test) else { return };
    let servers = "--agree parameter-server --servers 1";
    network.run(&ground, 0..7, &format!("PACELINE {TRAIN} {servers} --run run"), &[]);
    ground.same_as_one_process("run", 6);
}
