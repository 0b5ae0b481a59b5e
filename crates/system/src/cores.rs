//! The cores that this process may use, how they lie on NUMA nodes, and threads bound to them.
//!
//! A mask given from outside (`taskset`, `numactl`, a container, a batch system) is the limit of everything here: two
//! processes started with disjoint masks stay disjoint. Elsewhere than on Linux nothing is known and nothing is bound.

/// A core: a thread of the processor, by the system's number, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Core {
    /// The system's number.
    pub number: usize,
    /// The NUMA node whose memory is near.
    pub node: usize,
    /// 0 for the first thread of a physical core, 1 for the second one.
    pub sibling: usize,
}

/// The cores this thread may run on now, in the order of their numbers; empty where the system does not say.
pub fn allowed() -> Vec<Core> {
    let numbers = linux::affinity();
    let nodes = nodes();
    numbers
        .into_iter()
        .map(|number| {
            let node = nodes.iter().position(|cores| cores.contains(&number)).unwrap_or(0);
            let siblings = list(&format!("/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"));
            let sibling = siblings.iter().position(|&other| other == number).unwrap_or(0);
            Core { number, node, sibling }
        })
        .collect()
}

/// How many cores this thread may run on now; zero where the system does not say.
pub fn allowed_count() -> usize {
    linux::affinity().len()
}

/// How many cores the machine has, whatever part of them this process may use; zero where the system does not say.
pub fn online() -> usize {
    online_numbers().len()
}

/// The system's numbers of all cores.
pub(crate) fn online_numbers() -> Vec<usize> {
    list("/sys/devices/system/cpu/online")
}

/// The cores for so many threads: one each, whole physical cores before second threads, neighbours on the same node. None
/// unless the threads take more than half of the cores: a smaller pool may have company (another run, another container)
/// that would choose the same ones, so the system places it.
pub fn for_threads(allowed: &[Core], threads: usize) -> Option<Vec<Core>> {
    if threads < 2 || threads > allowed.len() || 2 * threads <= allowed.len() {
        return None;
    }
    let mut chosen = allowed.to_vec();
    chosen.sort_by_key(|core| (core.sibling, core.node, core.number));
    chosen.truncate(threads);
    chosen.sort_by_key(|core| (core.node, core.number));
    Some(chosen)
}

/// Binds the calling thread to a core; the answer undoes it. None where the system refuses.
pub fn bind(core: usize) -> Option<Bound> {
    linux::bind(core).map(Bound)
}

/// A thread that was bound to a core, and may run where it might before once this is dropped by it.
#[derive(Debug)]
pub struct Bound(Option<linux::Mask>);

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(mask) = &self.0 {
            linux::restore(mask);
        }
    }
}

/// The cores of each NUMA node, by the node's number.
fn nodes() -> Vec<Vec<usize>> {
    let online = list("/sys/devices/system/node/online");
    online.iter().map(|node| list(&format!("/sys/devices/system/node/node{node}/cpulist"))).collect()
}

/// The numbers in a file such as `0-3,8-11`.
fn list(path: &str) -> Vec<usize> {
    std::fs::read_to_string(path).map_or_else(|_| Vec::new(), |text| parse_list(&text))
}

fn parse_list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    text.trim().split(',').filter_map(range).filter(|range| *range.end() < 1 << 16).flatten().collect()
}

#[cfg(target_os = "linux")]
mod linux {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    pub type Mask = CpuSet;

    pub fn affinity() -> Vec<usize> {
        let Ok(mask) = sched_getaffinity(None) else { return Vec::new() };
        (0..CpuSet::MAX_CPU).filter(|&core| mask.is_set(core)).collect()
    }

    /// The mask before, or nothing if it was this one.
    pub fn bind(core: usize) -> Option<Option<Mask>> {
        let before = sched_getaffinity(None).ok()?;
        if core >= CpuSet::MAX_CPU || !before.is_set(core) {
            return None;
        }
        if before.count() == 1 {
            return Some(None);
        }
        let mut mask = CpuSet::new();
        mask.set(core);
        sched_setaffinity(None, &mask).ok().map(|()| Some(before))
    }

    pub fn restore(mask: &Mask) {
        // It was this thread's mask before, so only a mask that was narrowed from outside meanwhile refuses it.
        let _ = sched_setaffinity(None, mask);
    }
}

#[cfg(not(target_os = "linux"))]
mod linux {
    pub type Mask = ();

    pub fn affinity() -> Vec<usize> {
        Vec::new()
    }

    pub fn bind(_: usize) -> Option<Option<Mask>> {
        None
    }

    pub fn restore((): &Mask) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn core(number: usize, node: usize, sibling: usize) -> Core {
        Core { number, node, sibling }
    }

    fn numbers(cores: Option<Vec<Core>>) -> Option<Vec<usize>> {
        cores.map(|cores| cores.iter().map(|core| core.number).collect())
    }

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(parse_list("0-3,8-9,12\n"), [0, 1, 2, 3, 8, 9, 12]);
        assert!(parse_list("\n").is_empty());
        assert_eq!(parse_list("5,x,7-"), [5]);
    }

    #[test]
    fn threads_take_whole_cores_first_and_lie_node_by_node() {
        // Two nodes of two physical cores of two threads, numbered as Linux does.
        let cores: Vec<Core> = (0..8).map(|number| core(number, number / 2 % 2, number / 4)).collect();
        assert_eq!(numbers(for_threads(&cores, 8)), Some(vec![0, 1, 4, 5, 2, 3, 6, 7]));
        assert_eq!(numbers(for_threads(&cores, 5)), Some(vec![0, 1, 4, 2, 3]));
        assert_eq!(for_threads(&cores, 4), None, "half of the cores may be another run's");
        assert_eq!(for_threads(&cores, 9), None, "more threads than cores");
        assert_eq!(for_threads(&cores[..1], 1), None, "one thread has nobody to keep away from");
    }

    #[test]
    fn a_mask_from_outside_is_the_limit() {
        let cores = [core(3, 0, 0), core(6, 1, 0)];
        assert_eq!(numbers(for_threads(&cores, 2)), Some(vec![3, 6]));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_bound_thread_is_freed_again() {
        let before = allowed();
        assert!(!before.is_empty());
        let last = before[before.len() - 1];
        let bound = bind(last.number).unwrap();
        assert_eq!(allowed(), [last]);
        let started_bound = std::thread::spawn(allowed).join().unwrap();
        assert_eq!(started_bound, [last], "a thread starts where its parent may run: bind only around work");
        assert!(before.len() == 1 || bind(before[0].number).is_none(), "outside of the mask");
        drop(bind(last.number).unwrap());
        assert_eq!(allowed(), [last], "the inner of two frees nothing");
        drop(bound);
        assert_eq!(allowed(), before);
    }
}
