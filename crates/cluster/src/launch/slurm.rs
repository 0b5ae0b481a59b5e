//! A script for `sbatch`. The job draws its own token; `srun` carries it to the tasks in their environment, which only
//! the user can read, over Slurm's own authenticated connections.

use super::line;
use crate::ClusterError;
use crate::error::refused;

/// What to ask Slurm for.
#[derive(Clone, Debug)]
pub struct Slurm {
    /// Machines.
    pub nodes: usize,
    /// Processes on each.
    pub tasks_per_node: usize,
    /// Cores of each process; none for Slurm's default.
    pub cores: Option<usize>,
    /// The job's limit, as Slurm writes times (`2:00:00`); none for the partition's.
    pub time: Option<String>,
    /// The partition; none for the default.
    pub partition: Option<String>,
    /// The program and its arguments.
    pub command: Vec<String>,
}

impl Slurm {
    /// The script.
    ///
    /// # Errors
    /// When a value would break its line.
    pub fn script(&self) -> Result<String, ClusterError> {
        let mut options = vec![
            "--job-name=paceline".to_owned(),
            format!("--nodes={}", self.nodes),
            format!("--ntasks-per-node={}", self.tasks_per_node),
            "--output=paceline-%j.out".to_owned(),
            // A minute before the limit the tasks are told to save and end.
            "--signal=INT@60".to_owned(),
        ];
        options.extend(self.cores.map(|cores| format!("--cpus-per-task={cores}")));
        // A run that asks to be queued again may be, and what it said before is kept. Whoever is left has to have the time to ask.
        let restarts = self.command.iter().any(|word| word == "--restart" || word.starts_with("--restart="));
        if restarts {
            options.extend(["--requeue".to_owned(), "--open-mode=append".to_owned()]);
        }
        for (name, value) in [("time", &self.time), ("partition", &self.partition)] {
            if let Some(value) = value {
                let sound = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.,".contains(&byte);
                if value.is_empty() || !value.bytes().all(sound) {
                    return refused(format!(
                        "--{name} `{value}` is nothing that Slurm reads; leave out blanks and signs"
                    ));
                }
                options.push(format!("--{name}={value}"));
            }
        }
        let options: String = options.iter().map(|option| format!("#SBATCH {option}\n")).collect();
        let (kill, end) = match restarts {
            true => (0, "When a task fails, the others end by themselves, and one of them has the job queued again"),
            false => (1, "The first task that fails ends the others"),
        };
        Ok(format!(
            "#!/bin/bash\n{options}\nset -euo pipefail\n\
             # The token of this run: random, known to this job alone, never in an argument.\n\
             PACELINE_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\nexport PACELINE_TOKEN\n\n\
             # {end}; every line begins with its rank.\n\
             exec srun --kill-on-bad-exit={kill} --label {}\n",
            line(&self.command)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slurm() -> Slurm {
        Slurm {
            nodes: 2,
            tasks_per_node: 4,
            cores: Some(8),
            time: Some("2:00:00".into()),
            partition: None,
            command: ["paceline", "train", "--data", "folder:my photos"].map(str::to_owned).to_vec(),
        }
    }

    #[test]
    fn bash_accepts_the_script_and_the_token_is_one() {
        let script = slurm().script().unwrap();
        assert!(script.contains("#SBATCH --ntasks-per-node=4\n") && script.contains("#SBATCH --time=2:00:00\n"));
        // With srun replaced by a command that shows what it was given, the script runs anywhere.
        let shown = script.replace("exec srun", "printenv PACELINE_TOKEN; printf '%s\\n'");
        let output = std::process::Command::new("bash").args(["-c", &shown]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(paceline_comm::Token::from_hex(lines[0]).is_some(), "{text}");
        assert_eq!(&lines[1..], ["--kill-on-bad-exit=1", "--label", "paceline", "train", "--data", "folder:my photos"]);
    }

    #[test]
    fn a_run_that_may_be_started_again_is_a_job_that_may() {
        assert!(!slurm().script().unwrap().contains("--requeue"));
        let mut again = slurm();
        again.command.extend(["--restart".to_owned(), "2".to_owned()]);
        assert!(again.script().unwrap().contains("#SBATCH --requeue\n#SBATCH --open-mode=append\n"));
        assert!(again.script().unwrap().contains("exec srun --kill-on-bad-exit=0 --label"));
    }

    #[test]
    fn a_value_cannot_add_a_line() {
        assert!(Slurm { time: Some("1\n#SBATCH --uid=0".into()), ..slurm() }.script().is_err());
        assert!(Slurm { partition: Some("a b".into()), ..slurm() }.script().is_err());
    }
}
