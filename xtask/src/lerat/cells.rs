//! The grid: which work is done by which set-up on which machines, and what each cell is told.

/// A model with its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// As the study calls it.
    pub name: &'static str,
    /// The model.
    pub model: &'static str,
    /// Training images of an epoch.
    pub images: u32,
    /// Cut so that both halves take about as long.
    pub balanced: &'static str,
    /// The halves of the study.
    pub halves: &'static str,
    /// Batches that are measured. Larger ones are the line through these.
    pub measured: &'static [u32],
}

/// Both works of the study.
pub const WORKS: [Work; 2] = [
    Work {
        name: "ComplexSmall",
        model: "vgg16",
        images: 600,
        balanced: "features.12",
        halves: "features.17",
        measured: &[8, 32],
    },
    Work {
        name: "SimpleBig",
        model: "alexnet",
        images: 18_000,
        balanced: "features.6",
        halves: "features.8",
        measured: &[8, 32, 128],
    },
];

/// The batches of the study.
pub const BATCHES: [u32; 3] = [8, 32, 128];

/// Where the samples are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A folder of the machine's own.
    Local,
    /// The same folder, mounted at another place.
    Shared,
    /// A machine of its own, over the shaped link.
    Remote,
}

impl Place {
    /// For tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local copy",
            Self::Shared => "shared mount",
            Self::Remote => "over the link",
        }
    }
}

/// Whose program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Ours.
    Paceline,
    /// PyTorch.
    Torch,
}

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The work.
    pub work: Work,
    /// Samples of a step.
    pub batch: u32,
    /// The set-up, for tables.
    pub setup: &'static str,
    /// Whose program.
    pub side: Side,
    /// What it is told beside model, data and batch.
    pub arguments: Vec<String>,
    /// How many hosts; one has both cores unless `cores` says otherwise, two have a core each.
    pub nodes: usize,
    /// Processes that this script starts on each host.
    pub processes: usize,
    /// The cores of a single host.
    pub cores: &'static str,
    /// Where the samples are.
    pub place: Place,
    /// Steps that count.
    pub steps: usize,
}

/// One process on one core: what all else is compared with.
pub const ONE_CORE: &str = "one core";
/// One process with a thread on each core.
pub const TWO_THREADS: &str = "1 process × 2 threads";
/// Two replicas of one process.
pub const REPLICAS: &str = "2 replica threads";
/// Two processes.
pub const PROCESSES: &str = "2 processes × 1 thread";
/// Two hosts of a core each.
pub const TWO_NODES: &str = "2 nodes × 1 core";
/// Two hosts with two processes each, which send what they must.
pub const TWO_BY_TWO: &str = "2 nodes × 2 processes";
/// The same, all in one ring.
pub const FLAT_RING: &str = "2 nodes × 2 processes, flat ring";
/// The halves of the study, one micro-batch.
pub const HALVES: &str = "2 stages, the study's halves, m = 1";
/// Two stages, by micro-batches.
pub const STAGES: [(&str, u32); 4] =
    [("2 stages, m = 1", 1), ("2 stages, m = 2", 2), ("2 stages, m = 4", 4), ("2 stages, m = 8", 8)];

impl Cell {
    /// The name of its raw numbers.
    pub fn name(&self) -> String {
        let plain: String = self.setup.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let side = if self.side == Side::Torch { "torch" } else { "paceline" };
        let place = match self.place {
            Place::Local => "local",
            Place::Shared => "shared",
            Place::Remote => "remote",
        };
        format!("{}-b{}-{side}-{plain}-{place}", self.work.model, self.batch)
    }
}

/// What is asked of the script.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// One or two steps for each cell, and few cells.
    pub quick: bool,
    /// Whether hosts can be made.
    pub hosts: bool,
    /// Whether PyTorch is there.
    pub torch: bool,
    /// What `paceline train --help` says.
    pub help: &'a str,
}

/// All cells, those of one work together.
pub fn grid(extent: Extent<'_>) -> Vec<Cell> {
    let works = WORKS.iter();
    works.flat_map(|work| work.measured.iter().flat_map(move |&batch| of(*work, batch, extent))).collect()
}

fn of(work: Work, batch: u32, extent: Extent<'_>) -> Vec<Cell> {
    let steps = match (extent.quick, work.model, batch) {
        (true, ..) | (_, "vgg16", 32) => 1,
        (_, "vgg16", _) | (_, _, 128) => 3,
        _ => 6,
    };
    let cell = |setup, arguments: &str| Cell {
        work,
        batch,
        setup,
        side: Side::Paceline,
        arguments: arguments.split_whitespace().map(str::to_owned).collect(),
        nodes: 1,
        processes: 1,
        cores: "0,1",
        place: Place::Local,
        steps,
    };
    let mut cells = vec![
        Cell { cores: "0", ..cell(ONE_CORE, "--threads 1") },
        cell(TWO_THREADS, "--threads 2"),
        cell(REPLICAS, "--replicas 2 --threads 1"),
        cell(PROCESSES, "--workers 2 --threads 1"),
    ];
    let stages = |cut: &str, m: u32| format!("--split pipeline:2 --cuts {cut} --micro-batches {m} --threads 1");
    // Stages are measured before their first step, which takes as long as some steps: of the longest there are fewer.
    let is_long = work.model == "vgg16" && batch > 8;
    let fits = |m: u32| m <= batch && !(extent.quick && m > 2) && !(is_long && [2, 8].contains(&m));
    cells.extend(STAGES.iter().filter(|(_, m)| fits(*m)).map(|(setup, m)| cell(setup, &stages(work.balanced, *m))));
    cells.push(cell(HALVES, &stages(work.halves, 1)));
    if extent.help.contains("channel:") {
        cells.push(cell("channels over 2", "--split channel:2 --threads 1"));
    }
    if extent.hosts {
        let nodes = Cell { nodes: 2, ..cell(TWO_NODES, "--threads 1") };
        cells.push(nodes.clone());
        // Where the samples are, at one batch of each work; and bytes, at the batch with the shortest steps.
        if batch == if work.model == "vgg16" { 8 } else { 32 } {
            cells.extend([Place::Shared, Place::Remote].map(|place| Cell { place, ..nodes.clone() }));
            cells.push(Cell { place: Place::Remote, ..cell(TWO_THREADS, "--threads 2") });
        }
        if work.model == "alexnet" && batch == 8 {
            let two = |setup, more: &str| Cell { processes: 2, nodes: 2, steps: 1, ..cell(setup, more) };
            cells.push(two(TWO_BY_TWO, "--threads 1 --carry tcp"));
            cells.push(two(FLAT_RING, "--threads 1 --carry tcp --algorithm ring"));
        }
    }
    if extent.torch {
        let peer = |setup, processes| Cell { side: Side::Torch, processes, ..cell(setup, "") };
        cells.extend([peer(TWO_THREADS, 1), peer(PROCESSES, 2)]);
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_a_name_of_its_own() {
        let all = grid(Extent { quick: false, hosts: true, torch: true, help: "channel:N" });
        let names: std::collections::BTreeSet<String> = all.iter().map(Cell::name).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.len() > 60, "{}", all.len());
        let few = grid(Extent { quick: true, hosts: false, torch: false, help: "" });
        assert!(few.len() < all.len() && few.iter().all(|cell| cell.steps == 1 && cell.nodes == 1));
    }
}
