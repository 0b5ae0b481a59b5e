//! A real Slurm with one node, this machine: munge, a controller and a node's daemon, all of which end with the test.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::ground::{Ground, PATIENCE, Running, TRAIN, free_port, has, signal, skip, within};

/// How long the daemons may take until the node takes jobs.
const START_MAX: Duration = Duration::from_secs(20);

/// The daemons, ended in this order: first those that ask the others.
struct Slurm<'a> {
    ground: &'a Ground,
    _node: Running,
    _controller: Running,
    _munge: Running,
}

impl<'a> Slurm<'a> {
    /// Starts the daemons, or says why they do not run here.
    fn start(ground: &'a Ground) -> Result<Self, String> {
        let munge = start_munge(ground)?;
        configure(ground);
        let configured = |words: &str| {
            let mut command = ground.command(words);
            command.env("SLURM_CONF", ground.path("slurm.conf"));
            command
        };
        let mut controller = ground.start(&mut configured("slurmctld -D -i"), "slurmctld.txt");
        let mut node = ground.start(&mut configured("slurmd -D"), "slurmd.txt");
        let until = Instant::now() + START_MAX;
        loop {
            let state = configured("sinfo --noheader --format=%t").output().map_err(|error| error.to_string())?;
            if String::from_utf8_lossy(&state.stdout).trim() == "idle" {
                return Ok(Self { ground, _node: node, _controller: controller, _munge: munge });
            }
            for (name, daemon) in [("slurmctld", &mut controller), ("slurmd", &mut node)] {
                if daemon.ended() {
                    return Err(format!("{name} ended: {}", last_line(&daemon.said())));
                }
            }
            if Instant::now() > until {
                return Err(format!("no node after {START_MAX:?}: {}", last_line(&node.said())));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn command(&self, words: &str) -> Command {
        let mut command = self.ground.command(words);
        command.env("SLURM_CONF", self.ground.path("slurm.conf"));
        command
    }

    /// Runs a command as a job, which must succeed.
    fn run(&self, words: &str) {
        let mut command = self.command(words);
        let done = self.ground.start(&mut command, "said.txt").ends(PATIENCE);
        assert!(done.status.success(), "{words}: {}\n{}", done.status, done.said);
    }
}

fn last_line(text: &str) -> String {
    text.lines().next_back().unwrap_or("without a word").to_owned()
}

/// A key of its own, so that a Slurm that may run on this machine is not asked. The daemon wants the folder for its user alone.
fn start_munge(ground: &Ground) -> Result<Running, String> {
    let folder = ground.path("munge");
    std::fs::create_dir(&folder).unwrap();
    private(&folder);
    let key = folder.join("key");
    std::fs::write(&key, paceline::comm::Token::random().to_hex()).unwrap();
    private(&key);
    let words = "munged --foreground --force --key-file=munge/key --socket=SOCKET --pid-file=munge/pid \
                 --seed-file=munge/seed --log-file=munge/log";
    let socket = ground.path("munge.socket");
    let words = words.replace("SOCKET", &socket.display().to_string());
    let words = words.replace("=munge/", &format!("={}/", folder.display()));
    let mut munge = ground.start(&mut ground.command(&words), "munged.txt");
    let until = Instant::now() + START_MAX;
    while !socket.exists() {
        if munge.ended() || Instant::now() > until {
            return Err(format!("munged does not run: {}", last_line(&munge.said())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(munge)
}

fn private(path: &Path) {
    assert!(Command::new("chmod").arg("go=").arg(path).status().unwrap().success());
}

/// One node that starts processes without control groups, which containers seldom have.
fn configure(ground: &Ground) {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let host = host.trim().split('.').next().unwrap().to_owned();
    let (controller, node) = (free_port(), free_port());
    for folder in ["state", "spool"] {
        std::fs::create_dir(ground.path(folder)).unwrap();
    }
    let text = format!(
        "ClusterName=field
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=FOLDER/munge.socket,cred_expire=5
StateSaveLocation=FOLDER/state
SlurmdSpoolDir=FOLDER/spool
SlurmctldPidFile=FOLDER/slurmctld.pid
SlurmdPidFile=FOLDER/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=5 State=UP
"
    );
    std::fs::write(ground.path("slurm.conf"), text.replace("FOLDER", &ground.path("").display().to_string())).unwrap();
}

#[test]
fn two_tasks_of_srun_train_as_one_process() {
    let test = "two_tasks_of_srun_train_as_one_process";
    if !has(&["munged", "slurmctld", "slurmd", "srun", "sinfo"], test) {
        return;
    }
    let ground = Ground::new();
    let slurm = match Slurm::start(&ground) {
        Ok(slurm) => slurm,
        Err(reason) => return skip(test, &reason),
    };
    slurm.run(&format!("srun -n 2 PACELINE {TRAIN}"));
    ground.same_as_one_process(&ground.unnamed_run(), 2);
    slurm.run(&format!("srun -n 3 PACELINE {TRAIN} --agree parameter-server --servers 1 --run served"));
    ground.same_as_one_process("served", 2);
}

/// The process of a job's task that works in a folder.
fn task(folder: &Path, number: usize) -> Option<u32> {
    let folder = std::fs::canonicalize(folder).ok()?;
    let is_task = |pid: &u32| {
        let there = std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == folder);
        let program = std::fs::read_link(format!("/proc/{pid}/exe"));
        let ours = program.is_ok_and(|program| program == Path::new(env!("CARGO_BIN_EXE_paceline")));
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let word = format!("SLURM_PROCID={number}");
        there && ours && environment.split(|byte| *byte == 0).any(|found| found == word.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").ok()?;
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).find(is_task)
}

#[test]
#[ignore = "cargo x ci: field"]
fn a_job_whose_task_is_killed_is_queued_again_and_goes_on() {
    let test = "a_job_whose_task_is_killed_is_queued_again_and_goes_on";
    if !has(&["munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo"], test) {
        return;
    }
    let ground = Ground::new();
    let slurm = match Slurm::start(&ground) {
        Ok(slurm) => slurm,
        Err(reason) => return skip(test, &reason),
    };
    let train = TRAIN.replace("--max-steps 6", "--max-steps 300 --epochs 3 --calibrate off --checkpoint-every 4");
    let script = ground.run(&format!("PACELINE launch --slurm --workers 2 -- {train} --restart 1 --run run"));
    std::fs::write(ground.path("job.sh"), script).unwrap();
    slurm.run("sbatch job.sh");
    let said = || {
        let files = std::fs::read_dir(ground.path("")).unwrap().filter_map(|entry| Some(entry.ok()?.path()));
        let outputs = files.filter(|path| path.extension().is_some_and(|extension| extension == "out"));
        outputs.map(|path| std::fs::read_to_string(path).unwrap_or_default()).collect::<String>()
    };
    let events = || std::fs::read_to_string(ground.path("run/events/rank-0.jsonl")).unwrap_or_default();
    within(PATIENCE, || events().contains("\"event\":\"checkpoint\""), || format!("nothing was saved: {}", said()));
    let victim = task(&ground.path(""), 0).expect("the first task");
    signal("KILL", &victim.to_string());
    let ended = || events().contains("\"reason\":\"max-steps\"");
    within(PATIENCE, ended, || {
        let queue = slurm.command("scontrol show job").output().unwrap();
        format!("it did not go on: {}\n{}", said(), String::from_utf8_lossy(&queue.stdout))
    });
    assert_eq!(events().matches("\"event\":\"restarted\"").count(), 1, "{}", said());
    assert!(said().contains("starting again from step ") && said().contains(" (1 of 1)"), "{}", said());
    ground.run(&format!("PACELINE {train} --workers 2 --run straight"));
    let weights = |run: &str| {
        std::fs::read(ground.path(&format!("{run}/checkpoints/step-00000300/weights.safetensors"))).unwrap()
    };
    assert!(weights("run") == weights("straight"), "other weights");
}
