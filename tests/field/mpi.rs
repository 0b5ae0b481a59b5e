//! Started by `mpirun`, OpenMPI's and MPICH's: each process finds its place and the others by itself.

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
