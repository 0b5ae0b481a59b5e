//! Started by `mpirun`, OpenMPI's and MPICH's: each process finds its place and the others by itself. Built with the feature
//! `mpi`, messages travel over MPI as well, with the `mpirun` that belongs to `$MPICC` (`cargo x mpi`).

use crate::ground::{Ground, TRAIN, has};

fn three_ranks_train(mpirun: &str, options: &str, test: &str) {
    if !has(&[mpirun], test) {
        return;
    }
    let ground = Ground::new();
    ground.run(&format!("{mpirun} -n 3 {options} PACELINE {TRAIN} --run reduced"));
    ground.same_as_one_process("reduced", 3);
    let servers = "--agree parameter-server --servers 1";
    ground.run(&format!("{mpirun} -n 3 {options} PACELINE {TRAIN} {servers} --run served"));
    ground.same_as_one_process("served", 2);
}

#[test]
fn three_ranks_of_openmpi_train_as_one_process() {
    let options = "--allow-run-as-root --oversubscribe";
    three_ranks_train("mpirun.openmpi", options, "three_ranks_of_openmpi_train_as_one_process");
}

#[test]
fn three_ranks_of_mpich_train_as_one_process() {
    three_ranks_train("mpirun.mpich", "", "three_ranks_of_mpich_train_as_one_process");
}

#[cfg(feature = "mpi")]
#[test]
fn three_ranks_train_as_one_process_over_mpi() {
    let mpirun = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into()).replace("mpicc", "mpirun");
    let test = "three_ranks_train_as_one_process_over_mpi";
    if !has(&[&mpirun], test) {
        return;
    }
    let options = if mpirun.contains("mpich") { "" } else { "--allow-run-as-root --oversubscribe" };
    let ground = Ground::new();
    let carry = "--carry mpi";
    ground.run(&format!("{mpirun} -n 3 {options} PACELINE {TRAIN} {carry} --run reduced"));
    ground.same_as_one_process("reduced", 3);
    ground.run(&format!("{mpirun} -n 3 {options} PACELINE {TRAIN} {carry} --algorithm ring --run listed"));
    ground.same_as_one_process("listed", 3);
    let servers = "--agree parameter-server --servers 1";
    ground.run(&format!("{mpirun} -n 3 {options} PACELINE {TRAIN} {carry} {servers} --run served"));
    ground.same_as_one_process("served", 2);
    // Without mpirun there is no world of MPI.
    let alone = ground.finish(&format!("PACELINE {TRAIN} {carry} --workers 3 --run refused"));
    assert_eq!(alone.status.code(), Some(2), "{}", alone.said);
    assert!(alone.said.contains("mpirun -n 3 paceline train --carry mpi"), "{}", alone.said);
}
