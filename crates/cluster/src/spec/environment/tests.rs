//! The variables that launchers really set, and what happens when some are missing or wrong.

use super::*;

fn variables(text: &str) -> Variables {
    text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).map(|(k, v)| (k.into(), v.into())).collect()
}

fn member(text: &str) -> Member {
    from_environment(&variables(text)).unwrap().unwrap()
}

fn refusal(text: &str) -> String {
    let error = from_environment(&variables(text)).unwrap_err();
    assert!(error.is_refusal());
    error.to_string()
}

#[test]
fn no_launcher_is_no_member() {
    assert_eq!(from_environment(&variables("PATH=/bin HOME=/root")).unwrap(), None);
    assert_eq!(from_environment(&variables("SLURM_JOB_ID=3 SLURM_NTASKS=4")).unwrap(), None, "an salloc shell");
}

#[test]
fn rank_and_world_size() {
    let text = "RANK=3 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=2222 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2";
    let member = member(text);
    assert_eq!((member.rank.index(), member.world, member.source), (3, 8, Source::Variables));
    assert_eq!(member.local, Some(Local { rank: 1, world: 2 }));
    assert_eq!(member.rendezvous.to_string(), "a:2222");
    assert!(member.spans_machines());
    let alone = self::member("RANK=0 WORLD_SIZE=1");
    assert_eq!((alone.world, alone.spans_machines()), (1, false));
}

#[test]
fn half_of_it_is_refused() {
    assert!(refusal("RANK=0").contains("RANK is set and WORLD_SIZE is not; set both"));
    assert!(refusal("WORLD_SIZE=2").contains("WORLD_SIZE is set and RANK is not; set both"));
    assert!(refusal("RANK=0 WORLD_SIZE=2").contains("set MASTER_ADDR to the host of rank 0"));
    assert!(refusal("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a").contains("MASTER_PORT is not"));
    assert!(refusal("RANK=0 WORLD_SIZE=2 MASTER_PORT=1").contains("MASTER_ADDR is not"));
    let whole = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1";
    assert!(refusal(&format!("{whole} LOCAL_RANK=0")).contains("LOCAL_WORLD_SIZE is not"));
    assert!(refusal("OMPI_COMM_WORLD_RANK=0").contains("OMPI_COMM_WORLD_SIZE is not"));
    assert!(refusal("PMI_SIZE=2").contains("PMI_RANK is not"));
    assert!(refusal("SLURM_PROCID=0").contains("SLURM_NTASKS is not"));
}

#[test]
fn contradictions_are_refused() {
    let at = "MASTER_ADDR=a MASTER_PORT=1";
    assert!(refusal(&format!("RANK=2 WORLD_SIZE=2 {at}")).contains("the last is rank 1"));
    assert!(refusal(&format!("RANK=0 WORLD_SIZE=0 {at}")).contains("a run has 1 to"));
    assert!(refusal(&format!("RANK=-1 WORLD_SIZE=2 {at}")).contains("RANK is `-1`"));
    assert!(refusal(&format!("RANK=0 WORLD_SIZE=99999999999 {at}")).contains("a run has 1 to"));
    assert!(refusal(&format!("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 {at}")).contains("LOCAL_RANK is 2"));
    assert!(refusal(&format!("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 {at}")).contains("set all four"));
    assert!(refusal(&format!("RANK=0 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 {at}")).contains("unset RANK"));
    assert!(refusal("RANK=0 WORLD_SIZE=2 MASTER_ADDR=-x MASTER_PORT=1").contains("MASTER_ADDR is `-x`"));
    assert!(refusal("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0").contains("MASTER_PORT is `0`"));
}

const OPENMPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1";

#[test]
fn openmpi_on_one_machine_meets_on_loopback_at_the_jobs_port() {
    let job = |id: u32| member(&format!("{OPENMPI} OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_MCA_ess_base_jobid={id}"));
    let member = job(7);
    assert_eq!((member.rank.index(), member.world, member.source), (1, 4, Source::OpenMpi));
    assert_eq!(member.rendezvous.host, "127.0.0.1");
    assert!((20_000..29_000).contains(&member.rendezvous.port) && !member.spans_machines());
    assert_ne!(member.rendezvous.port, job(8).rendezvous.port);
}

#[test]
fn openmpi_on_several_machines_needs_to_know_where() {
    let text = format!("{OPENMPI} OMPI_COMM_WORLD_LOCAL_SIZE=2");
    assert!(refusal(&text).contains("mpirun -x MASTER_ADDR=HOST"));
    assert_eq!(member(&format!("{text} MASTER_ADDR=a")).rendezvous.to_string(), format!("a:{PORT}"));
    let inside_slurm = format!("{text} SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n[3-4]");
    let member = member(&inside_slurm);
    assert_eq!((member.rendezvous.host.as_str(), member.source), ("n3", Source::OpenMpi));
}

#[test]
fn mpich() {
    let member = member("PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3 PMI_FD=6");
    assert_eq!((member.rank.index(), member.world, member.source), (2, 3, Source::Pmi));
    assert_eq!(member.rendezvous.to_string(), format!("127.0.0.1:{PORT}"));
    assert!(refusal("PMI_RANK=2 PMI_SIZE=3").contains("mpirun -genv MASTER_ADDR HOST"));
}

const SRUN: &str = "SLURM_JOB_ID=91 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 \
    SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=node[01-03,07]";

#[test]
fn srun_over_four_nodes() {
    let member = member(SRUN);
    assert_eq!((member.rank.index(), member.world, member.source), (5, 7, Source::Slurm));
    assert_eq!(member.local, Some(Local { rank: 1, world: 2 }));
    assert_eq!(member.rendezvous.host, "node01");
    assert!(member.spans_machines());
    assert_eq!(self::member(&format!("{SRUN} PMI_RANK=5 PMI_SIZE=7")), member, "srun speaks PMI too");
    assert_eq!(self::member(&format!("{SRUN} MASTER_ADDR=x MASTER_PORT=77")).rendezvous.to_string(), "x:77");
}

#[test]
fn srun_on_one_node_meets_on_loopback() {
    let member = member("SLURM_JOB_ID=4 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=box");
    assert_eq!(member.rendezvous.host, "127.0.0.1");
    let other = self::member("SLURM_JOB_ID=4 SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=box");
    assert_ne!(member.rendezvous.port, other.rendezvous.port, "two steps of a job do not meet");
}

#[test]
fn a_batch_script_without_srun_is_refused() {
    let text = "SLURM_JOB_ID=4 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NODELIST=box";
    assert!(refusal(text).contains("srun paceline train"));
    let one = "SLURM_JOB_ID=4 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=box";
    assert_eq!(member(one).world, 1);
}

#[test]
fn damaged_lists_are_refused() {
    assert!(refusal("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[1-").contains("set MASTER_ADDR"));
}
