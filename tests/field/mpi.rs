//! Started by `mpirun`, OpenMPI's and MPICH's: each process finds its place and the others by itself. Built with the feature
//! `mpi`, messages travel over MPI as well, with the `mpirun` that belongs to `$MPICC` (`cargo x mpi`).

use crate::ground::{Ground, TRAIN, has};

fn three_ranks_train(mpirun: &str, options: &str, test: &str) {
    if !has(&[mpirun], test) {
        return;
    }
    let ground = Ground::new();
    ground.run(&format!("{mpirun} -n 3 {options} PACELINE {TRAIN}"));
    ground.same_as_one_process(&ground.unnamed_run(), 3);
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

/// With the feature `mpi`: everything over MPI.
#[cfg(feature = "mpi")]
mod over_mpi {
    use std::time::Duration;

    use crate::faults::{SOON, only_left, processes};
    use crate::ground::{Ground, PATIENCE, TRAIN, free_port, has, signal, within};

    /// The `mpirun` of the MPI that the binary was built with, and its options.
    fn mpirun(test: &str) -> Option<String> {
        let mpirun = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into()).replace("mpicc", "mpirun");
        let options = if mpirun.contains("mpich") { "" } else { "--allow-run-as-root --oversubscribe" };
        has(&[&mpirun], test).then(|| format!("{mpirun} -n 3 {options} PACELINE"))
    }

    #[test]
    fn three_ranks_train_as_one_process() {
        let Some(mpirun) = mpirun("over_mpi::three_ranks_train_as_one_process") else { return };
        let ground = Ground::new();
        for (run, more, workers) in [
            ("reduced", "", 3),
            ("listed", "--algorithm ring", 3),
            ("served", "--agree parameter-server --servers 1", 2),
        ] {
            ground.run(&format!("{mpirun} {TRAIN} --carry mpi {more} --run {run}"));
            ground.same_as_one_process(run, workers);
        }
        // Without mpirun there is no world of MPI.
        let alone = ground.finish(&format!("PACELINE {TRAIN} --carry mpi --workers 3 --run refused"));
        assert_eq!(alone.status.code(), Some(2), "{}", alone.said);
        assert!(alone.said.contains("mpirun -n 3 paceline train --carry mpi"), "{}", alone.said);
    }

    /// MPI waits for every process that `mpirun` has started; one of them is no Paceline and never comes.
    #[test]
    fn a_world_that_does_not_form_is_given_up() {
        let Some(mpirun) = mpirun("over_mpi::a_world_that_does_not_form_is_given_up") else { return };
        let ground = Ground::new();
        let (launch, _) = mpirun.split_once(" PACELINE").expect("it starts Paceline");
        let launch = launch.replace("-n 3", "-n 2");
        // Two ranks meet each other by these variables, and MPI has three.
        let ranks = "RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1";
        let script = format!("{ranks} MASTER_PORT={} exec \"$@\"\n", free_port());
        std::fs::write(ground.path("rank.sh"), script).unwrap();
        let command = format!("{launch} sh rank.sh PACELINE {TRAIN} --carry mpi --run run : -n 1 sleep 300");
        let done = ground.finish(&command);
        assert!(!done.status.success(), "{}", done.said);
        assert!(done.said.contains("MPI_Init") && done.said.contains("check that mpirun starts"), "{}", done.said);
    }

    /// Stopped or killed, one rank takes all others with it, and the run can go on.
    #[test]
    fn a_rank_that_fails_ends_all() {
        let Some(mpirun) = mpirun("over_mpi::a_rank_that_fails_ends_all") else { return };
        for fault in ["KILL", "STOP"] {
            let ground = Ground::new();
            let line = "train --model lenet5 --data shapes --batch 48 --max-steps 4000 --checkpoint-every 4 --threads 1 --silent 3s --quiet";
            let command = format!("{mpirun} {line} --carry mpi --run run");
            let running = ground.start(&mut ground.command(&command), "said.txt");
            within(PATIENCE, || ground.path("run/checkpoints/step-00000008").exists(), || running.said());
            let found = processes(&ground).into_iter().find(|(_, rank)| *rank == Some(1));
            let (pid, _) = found.unwrap_or_else(|| panic!("no process of rank 1: {}", running.said()));
            signal(fault, &pid.to_string());
            let done = running.ends(SOON + Duration::from_secs(5));
            assert!(!done.status.success(), "{fault}: {}", done.said);
            assert!(fault == "KILL" || done.said.contains("rank 1 on "), "{fault}: {}", done.said);
            only_left(&ground, SOON, &[]);
        }
    }
}
