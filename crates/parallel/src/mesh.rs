//! Who computes what: which part of which stage of which worker a rank has, and with whom it shares what
//! along each axis. Plain values, with no process and no connection behind them.
//!
//! A worker is one replica of the model, computed by stages × parts ranks. Ranks count parts first, then
//! stages, then workers, and servers come last:
//!
//! ```text
//! rank = (data × stages + stage) × parts + part        data = the worker's number, on node after node
//! ```
//!
//! Launchers number ranks node by node, so the ranks of one worker are neighbours, on one node wherever they
//! fit: parts talk most (within every layer), stages less (between some layers), workers least (once a step).

use paceline_comm::Rank;

/// How many of each there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Replicas of the model, each with a share of every batch.
    pub workers: usize,
    /// Consecutive pieces that the layers of a model are cut into.
    pub stages: usize,
    /// Pieces that each layer is cut into.
    pub parts: usize,
    /// Processes that hold parameters and compute nothing.
    pub servers: usize,
}

impl Extent {
    /// Ranks that compute.
    pub const fn computing(&self) -> usize {
        self.workers * self.stages * self.parts
    }

    /// All ranks.
    pub const fn processes(&self) -> usize {
        self.computing() + self.servers
    }
}

/// An axis of the mesh, along which a group of ranks lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// The same part of the same stage, in all workers: those who average gradients.
    Data,
    /// The same part, in all stages of one worker: those who pass activations on.
    Stage,
    /// All parts of one stage of one worker: those who compute a layer together.
    Part,
    /// Those along `Data` that are on one node.
    Local,
    /// One of each node along `Data`: those with the same local number.
    Across,
}

impl Axis {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Data, Self::Stage, Self::Part, Self::Local, Self::Across];
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// The node it runs on.
    pub node: usize,
    /// Its number among those along `Data` that are on this node.
    pub local: usize,
    /// Its worker.
    pub data: usize,
    /// Its stage of the model.
    pub stage: usize,
    /// Its part of the stage.
    pub part: usize,
}

/// The ranks of a run and their coordinates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    extent: Extent,
    /// The node of each rank that computes.
    node_of: Vec<usize>,
}

impl Mesh {
    /// A mesh, given the node of every rank.
    ///
    /// # Panics
    /// When nobody computes, or there are more or fewer nodes than ranks: bugs.
    pub fn new(extent: Extent, node_of: &[usize]) -> Self {
        assert!(extent.computing() > 0, "a mesh has at least one worker, one stage and one part");
        assert_eq!(node_of.len(), extent.processes(), "every rank has a node");
        Self { extent, node_of: node_of[..extent.computing()].to_vec() }
    }

    /// A mesh on one node.
    ///
    /// # Panics
    /// When nobody computes: a bug.
    pub fn on_one_node(extent: Extent) -> Self {
        Self::new(extent, &vec![0; extent.processes()])
    }

    /// How many of each there are.
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// The ranks that hold parameters.
    pub fn servers(&self) -> Vec<Rank> {
        (self.extent.computing()..self.extent.processes()).map(Rank::at).collect()
    }

    /// The ranks that compute.
    pub fn computing(&self) -> Vec<Rank> {
        (0..self.extent.computing()).map(Rank::at).collect()
    }

    /// Where a rank is; none for servers, which are nowhere on the mesh.
    pub fn coordinates(&self, rank: Rank) -> Option<Coordinates> {
        let Extent { stages, parts, .. } = self.extent;
        let &node = self.node_of.get(rank.index())?;
        let (data, stage, part) = (rank.index() / parts / stages, rank.index() / parts % stages, rank.index() % parts);
        let local = (0..data).filter(|&data| self.node_of[self.index(data, stage, part)] == node).count();
        Some(Coordinates { node, local, data, stage, part })
    }

    /// The rank of a part of a stage of a worker; none outside the mesh.
    pub fn rank(&self, data: usize, stage: usize, part: usize) -> Option<Rank> {
        let Extent { workers, stages, parts, .. } = self.extent;
        (data < workers && stage < stages && part < parts).then(|| Rank::at(self.index(data, stage, part)))
    }

    const fn index(&self, data: usize, stage: usize, part: usize) -> usize {
        (data * self.extent.stages + stage) * self.extent.parts + part
    }

    /// The ranks along an axis through a rank that computes, itself among them, in rising order.
    ///
    /// # Panics
    /// For a server, or a rank that there is not: a bug.
    pub fn group(&self, axis: Axis, rank: Rank) -> Vec<Rank> {
        let Some(at) = self.coordinates(rank) else { panic!("{rank} computes nothing") };
        let Extent { workers, stages, parts, .. } = self.extent;
        let Coordinates { data, stage, part, .. } = at;
        let along_data = || (0..workers).map(|data| Rank::at(self.index(data, stage, part)));
        let like = |same: fn(&Coordinates) -> usize| {
            let found = along_data().filter(|&other| self.coordinates(other).is_some_and(|of| same(&of) == same(&at)));
            found.collect()
        };
        match axis {
            Axis::Data => along_data().collect(),
            Axis::Stage => (0..stages).map(|stage| Rank::at(self.index(data, stage, part))).collect(),
            Axis::Part => (0..parts).map(|part| Rank::at(self.index(data, stage, part))).collect(),
            Axis::Local => like(|at| at.node),
            Axis::Across => like(|at| at.local),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Meshes whose ranks are dealt out to nodes in any way.
    fn meshes() -> impl Strategy<Value = Mesh> {
        let extent = (1usize..7, 1usize..5, 1usize..4, 0usize..4);
        let extent = extent.prop_map(|(workers, stages, parts, servers)| Extent { workers, stages, parts, servers });
        extent.prop_flat_map(|extent| {
            let nodes = proptest::collection::vec(0usize..4, extent.processes());
            nodes.prop_map(move |nodes| Mesh::new(extent, &nodes))
        })
    }

    proptest! {
        #[test]
        fn ranks_and_coordinates_name_each_other(mesh in meshes()) {
            let mut seen = HashSet::new();
            for rank in mesh.computing() {
                let Coordinates { node, local, data, stage, part } = mesh.coordinates(rank).unwrap();
                prop_assert_eq!(mesh.rank(data, stage, part), Some(rank));
                prop_assert!(seen.insert((data, stage, part)));
                prop_assert!(seen.insert((usize::MAX - node, usize::MAX - local, stage * 100 + part)), "node × local is data");
            }
            let Extent { workers, stages, parts, servers } = mesh.extent();
            prop_assert_eq!(mesh.rank(workers, 0, 0).or(mesh.rank(0, stages, 0)).or(mesh.rank(0, 0, parts)), None);
            prop_assert_eq!(mesh.servers().len(), servers);
            prop_assert!(mesh.servers().iter().all(|&server| mesh.coordinates(server).is_none()));
            prop_assert_eq!(mesh.computing().len() + servers, mesh.extent().processes());
        }

        #[test]
        fn the_groups_of_an_axis_are_all_ranks_once(mesh in meshes()) {
            for axis in Axis::ALL {
                let groups: HashSet<Vec<Rank>> = mesh.computing().iter().map(|&rank| mesh.group(axis, rank)).collect();
                let mut ranks: Vec<Rank> = groups.into_iter().flatten().collect();
                ranks.sort_unstable();
                prop_assert_eq!(ranks, mesh.computing(), "{:?}", axis);
                prop_assert!(mesh.computing().iter().all(|&rank| mesh.group(axis, rank).contains(&rank)));
            }
        }

        #[test]
        fn two_ranks_share_at_most_one_of_the_groups(mesh in meshes()) {
            for one in mesh.computing() {
                let shares = |axes: &[Axis], other| {
                    axes.iter().filter(|&&axis| mesh.group(axis, one).contains(&other)).count()
                };
                for other in mesh.computing().into_iter().filter(|&other| other != one) {
                    prop_assert!(shares(&[Axis::Data, Axis::Stage, Axis::Part], other) <= 1);
                    prop_assert!(shares(&[Axis::Local, Axis::Across], other) <= shares(&[Axis::Data], other));
                }
            }
        }
    }

    fn ranks<const N: usize>(numbers: [u32; N]) -> Vec<Rank> {
        numbers.map(Rank).to_vec()
    }

    #[test]
    fn the_ranks_of_a_worker_are_neighbours() {
        // Two nodes of eight: each has two workers of two stages of two parts; then two servers.
        let extent = Extent { workers: 4, stages: 2, parts: 2, servers: 2 };
        let nodes: Vec<usize> = (0..18).map(|rank| usize::from(rank >= 8)).collect();
        let mesh = Mesh::new(extent, &nodes);
        let at = Coordinates { node: 1, local: 0, data: 2, stage: 1, part: 0 };
        assert_eq!(mesh.coordinates(Rank(10)), Some(at));
        let groups = Axis::ALL.map(|axis| mesh.group(axis, Rank(10)));
        let [data, stage, part] = [ranks([2, 6, 10, 14]), ranks([8, 10]), ranks([10, 11])];
        assert_eq!(groups, [data, stage, part, ranks([10, 14]), ranks([2, 10])]);
        assert_eq!(mesh.servers(), ranks([16, 17]));
    }

    #[test]
    fn without_a_split_a_rank_is_a_worker() {
        let mesh = Mesh::on_one_node(Extent { workers: 3, stages: 1, parts: 1, servers: 1 });
        let all = ranks([0, 1, 2]);
        let one = ranks([1]);
        let groups = Axis::ALL.map(|axis| mesh.group(axis, Rank(1)));
        assert_eq!(groups, [all.clone(), one.clone(), one.clone(), all, one]);
    }
}
