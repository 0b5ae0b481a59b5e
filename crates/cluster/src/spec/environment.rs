//! What launchers put into the environment. In this order, the first that is there: `RANK/WORLD_SIZE/MASTER_ADDR/
//! MASTER_PORT`, OpenMPI's, PMI's (MPICH, Intel MPI), Slurm's.
//!
//! Where a launcher does not say where rank 0 listens, its host is loopback if all are on one machine and the first node
//! of the job otherwise, and the port follows from the job's number, so that two jobs on a machine do not meet. A port
//! is not a secret and nothing secret is made of it: the token is drawn at random.

use paceline_system::random;

use super::{Address, Local, Member, PORT, Source, Variables, nodelist, place};
use crate::ClusterError;
use crate::error::refused;

/// The member that the environment describes; none if no launcher has been there.
///
/// # Errors
/// When variables are missing, are not numbers, or contradict each other.
pub fn from_environment(variables: &Variables) -> Result<Option<Member>, ClusterError> {
    let set = |name: &str| variables.get(name).is_some_and(|value| !value.is_empty());
    let reader = Reader(variables);
    let read = if set("RANK") || set("WORLD_SIZE") {
        variables_member
    } else if set("OMPI_COMM_WORLD_RANK") || set("OMPI_COMM_WORLD_SIZE") {
        openmpi_member
    } else if set("PMI_RANK") || set("PMI_SIZE") {
        pmi_member
    } else if set("SLURM_PROCID") || set("SLURM_STEP_NUM_TASKS") {
        slurm_member
    } else {
        return Ok(None);
    };
    if reader.is_batch_script() {
        return refused(
            "this is the batch script of a Slurm job with several tasks, and only srun starts them: type \
             srun paceline train …, or --workers 1 to train alone",
        );
    }
    read(&reader).map(Some)
}

struct Reader<'a>(&'a Variables);

impl Reader<'_> {
    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// A whole number, or none if the variable is not set.
    fn number(&self, name: &str) -> Result<Option<usize>, ClusterError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => refused(format!("{name} is `{text}`; set it to a whole number from 0")),
        }
    }

    /// A whole number that has to be there because `other` is.
    fn needed(&self, name: &str, other: &str) -> Result<usize, ClusterError> {
        let number = self.number(name)?;
        number.ok_or_else(|| ClusterError::Refused(format!("{other} is set and {name} is not; set both, or neither")))
    }

    fn pair(&self, rank: &str, world: &str) -> Result<(usize, usize), ClusterError> {
        Ok((self.needed(rank, world)?, self.needed(world, rank)?))
    }

    /// The place on the machine: both variables or neither.
    fn local(&self, rank: &str, world: &str) -> Result<Option<Local>, ClusterError> {
        if self.text(rank).is_none() && self.text(world).is_none() {
            return Ok(None);
        }
        let (local, count) = self.pair(rank, world)?;
        match local < count {
            true => Ok(Some(Local { rank: local, world: count })),
            false => refused(format!("{rank} is {local} and {world} is {count}; the last local rank is one less")),
        }
    }

    fn port(&self) -> Result<Option<u16>, ClusterError> {
        let Some(text) = self.text("MASTER_PORT") else { return Ok(None) };
        match text.parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => refused(format!("MASTER_PORT is `{text}`; set it to a port from 1 to 65535, such as {PORT}")),
        }
    }

    /// In a Slurm batch script, outside of srun: Slurm has set the rank of the script itself.
    fn is_batch_script(&self) -> bool {
        let launched = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID", "SLURM_STEPID"];
        let tasks = self.number("SLURM_NTASKS").ok().flatten().unwrap_or(1);
        self.text("SLURM_JOB_ID").is_some() && tasks > 1 && launched.iter().all(|name| self.text(name).is_none())
    }

    /// A port of this job: jobs that run side by side on a machine should not meet at the same one. Below the range from
    /// which Linux takes ports for outgoing connections.
    fn job_port(&self) -> u16 {
        let names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"];
        let job: Vec<&str> = names.iter().filter_map(|name| self.text(name)).collect();
        match job.is_empty() {
            true => PORT,
            false => 20_000 + (random::key_of_text(&job.join(".")) % 9_000) as u16,
        }
    }

    /// Where rank 0 listens, for a launcher that does not say.
    fn meeting(&self, one_machine: bool, hint: &str) -> Result<Address, ClusterError> {
        let port = self.port()?.unwrap_or_else(|| self.job_port());
        let nodes = self.text("SLURM_STEP_NODELIST").or_else(|| self.text("SLURM_JOB_NODELIST"));
        let host = match (self.text("MASTER_ADDR"), nodes) {
            (Some(host), _) => host.to_owned(),
            (None, _) if one_machine => "127.0.0.1".to_owned(),
            (None, Some(nodes)) => nodelist::expand(nodes)?.swap_remove(0),
            (None, None) => {
                return refused(format!("the processes are on several machines; say where rank 0 is: {hint}"));
            }
        };
        address(host, port)
    }

    fn member(
        &self,
        (rank, world): (usize, usize),
        local: Option<Local>,
        rendezvous: Address,
        source: Source,
    ) -> Result<Member, ClusterError> {
        let (rank, world) = place(rank, world, &source.to_string())?;
        if let Some(local) = local
            && (local.world > world || local.rank > rank.index())
        {
            return refused(format!(
                "{source}: {rank} of {} cannot be number {} of {} on its machine; set all four alike",
                world, local.rank, local.world
            ));
        }
        Ok(Member { rank, world, servers: 0, local, hosts: Vec::new(), rendezvous, data: None, source })
    }
}

fn address(host: String, port: u16) -> Result<Address, ClusterError> {
    match Address::is_host(&host) {
        true => Ok(Address { host, port }),
        false => refused(format!("MASTER_ADDR is `{host}`; set it to the host name or address of rank 0")),
    }
}

fn variables_member(reader: &Reader) -> Result<Member, ClusterError> {
    let (rank, world) = reader.pair("RANK", "WORLD_SIZE")?;
    for other in ["OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
        if let Some(number) = reader.number(other)?
            && number != rank
        {
            return refused(format!("RANK is {rank} and {other} is {number}; unset RANK and WORLD_SIZE under mpirun"));
        }
    }
    let local = reader.local("LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    let rendezvous = match (reader.text("MASTER_ADDR"), reader.port()?) {
        (Some(host), Some(port)) => address(host.to_owned(), port)?,
        (None, None) if world == 1 => address("127.0.0.1".into(), PORT)?,
        (host, _) => {
            let missing = if host.is_none() { "MASTER_ADDR" } else { "MASTER_PORT" };
            return refused(format!(
                "RANK and WORLD_SIZE are set and {missing} is not; set MASTER_ADDR to the host of rank 0 and \
                 MASTER_PORT to a free port there, such as {PORT}"
            ));
        }
    };
    reader.member((rank, world), local, rendezvous, Source::Variables)
}

fn openmpi_member(reader: &Reader) -> Result<Member, ClusterError> {
    let (rank, world) = reader.pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
    let local = reader.local("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let one_machine = local.is_some_and(|local| local.world == world) || world == 1;
    let rendezvous = reader.meeting(one_machine, "mpirun -x MASTER_ADDR=HOST …")?;
    reader.member((rank, world), local, rendezvous, Source::OpenMpi)
}

fn pmi_member(reader: &Reader) -> Result<Member, ClusterError> {
    let (rank, world) = reader.pair("PMI_RANK", "PMI_SIZE")?;
    // srun speaks PMI too; what it says itself is more.
    let slurm = (reader.number("SLURM_PROCID")?, reader.number("SLURM_STEP_NUM_TASKS")?);
    if slurm == (Some(rank), Some(world)) {
        return slurm_member(reader);
    }
    let local = reader.local("MPI_LOCALRANKID", "MPI_LOCALNRANKS")?;
    let one_machine = local.is_some_and(|local| local.world == world) || world == 1;
    let rendezvous = reader.meeting(one_machine, "mpirun -genv MASTER_ADDR HOST …")?;
    reader.member((rank, world), local, rendezvous, Source::Pmi)
}

fn slurm_member(reader: &Reader) -> Result<Member, ClusterError> {
    let tasks = if reader.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let (rank, world) = reader.pair("SLURM_PROCID", tasks)?;
    let nodes = match reader.text("SLURM_STEP_NODELIST").or_else(|| reader.text("SLURM_JOB_NODELIST")) {
        Some(list) => nodelist::expand(list)?.len(),
        None => 0,
    };
    let local = slurm_local(reader)?;
    let one_machine = nodes == 1 || world == 1;
    let rendezvous = reader.meeting(one_machine, "export MASTER_ADDR=HOST before srun")?;
    reader.member((rank, world), local, rendezvous, Source::Slurm)
}

/// The place on the node: `SLURM_LOCALID`, and the node's entry in `2(x3),1`, which means 2, 2, 2, 1.
fn slurm_local(reader: &Reader) -> Result<Option<Local>, ClusterError> {
    let per_node = reader.text("SLURM_STEP_TASKS_PER_NODE").or_else(|| reader.text("SLURM_TASKS_PER_NODE"));
    let (Some(rank), Some(node), Some(per_node)) =
        (reader.number("SLURM_LOCALID")?, reader.number("SLURM_NODEID")?, per_node)
    else {
        return Ok(None);
    };
    let mut left = node;
    for part in per_node.split(',') {
        let (count, times) = part.split_once("(x").unwrap_or((part, "1)"));
        let (count, times) = (count.parse::<usize>().ok(), times.strip_suffix(')').and_then(|text| text.parse().ok()));
        let (Some(count), Some(times)) = (count, times) else { return Ok(None) };
        if left < times {
            return Ok((rank < count).then_some(Local { rank, world: count }));
        }
        left -= times;
    }
    Ok(None)
}

#[cfg(test)]
#[path = "environment/tests.rs"]
mod tests;
