//! `--restart N` under Slurm: only Slurm can start the tasks of a job again, so whoever is left of a failed run asks it to put the job
//! back into its queue. When it begins again, Slurm says so (`SLURM_RESTART_COUNT`), and the same command line resumes.

use std::process::Command;

use crate::cluster::launch::child;
use crate::cluster::spec::Variables;

use crate::arguments::Train;
use crate::command::note;
use crate::failure::Failure;

/// How often the job was queued again, by us or by anybody.
const COUNT: &str = "SLURM_RESTART_COUNT";

/// A job that may be queued again.
pub struct Requeue {
    job: String,
    /// How often it may be.
    pub most: u64,
    /// How often it was.
    pub count: u64,
}

/// How often the job that this process is of was queued again; 0 unless `--restart` was typed.
pub fn restarts(arguments: &Train, variables: &Variables) -> u64 {
    if arguments.restart.is_none() || arguments.restarted.is_some() || !variables.contains_key("SLURM_JOB_ID") {
        return 0;
    }
    variables.get(COUNT).and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl Requeue {
    /// The job to queue again, if this process is a task of one and that was asked for.
    ///
    /// # Errors
    /// When nobody could start this process again, or nobody would know the run's folder.
    pub fn find(arguments: &Train, variables: &Variables) -> Result<Option<Self>, Failure> {
        let ranks = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
        let by_others = arguments.cluster.is_some() || ranks.iter().any(|name| variables.contains_key(*name));
        let (Some(most @ 1..), None, true) = (arguments.restart, arguments.restarted, by_others) else {
            return Ok(None);
        };
        // Inside of an allocation, another launcher's processes are no tasks: the job is its user's shell.
        let is_task = variables.contains_key("SLURM_PROCID") && !variables.contains_key(child::PARENT);
        let job = variables.get("SLURM_JOB_ID").filter(|job| is_task && job.bytes().all(|byte| byte.is_ascii_digit()));
        let Some(job) = job else {
            return Err(Failure::refused(
                "--restart is for `paceline train --workers` or --hosts, which start the processes, and for jobs of Slurm; \
                 whoever started this process has to start it again: leave --restart out",
            ));
        };
        if arguments.run.is_none() && arguments.resume.is_none() {
            return Err(Failure::refused(
                "a job that begins again has to find its run: with --restart under Slurm, type --run DIR as well",
            ));
        }
        Ok(Some(Self { job: job.clone(), most, count: restarts(arguments, variables) }))
    }

    /// Whether it was not queued again often enough.
    pub fn may_ask(&self) -> bool {
        self.count < self.most
    }

    /// Asks Slurm, which ends what is left of the job.
    pub fn ask(&self) {
        let job = &self.job;
        note(&format!("asking Slurm to queue job {job} again"));
        let refused = |why: &str| note(&format!("Slurm does not queue job {job} again: {why}"));
        match Command::new("scontrol").args(["requeue", job]).output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => refused(String::from_utf8_lossy(&output.stderr).trim()),
            Err(error) => refused(&format!("scontrol did not run: {error}")),
        }
    }
}
