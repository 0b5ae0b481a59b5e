//! Parts of layers over every transport: sums are the same bits on all parts, pieces of any lengths come to all, other workers' parts are
//! no part of it, and a part that is gone is named.

#[path = "../../comm/tests/world.rs"]
mod world;

use std::ops::Range;

use paceline_comm::Rank;
use paceline_parallel::agree::{StepReport, Votes};
use paceline_parallel::mesh::{Extent, Mesh};
use paceline_parallel::part::PartLinks;
use paceline_parallel::siblings::ReplicaLinks;
use proptest::prelude::*;
use world::{Carry, TIMEOUT, communicators_for, on_all, options};

const CARRIES: [Carry; 3] = [Carry::Thread, Carry::Shm, Carry::Tcp];

fn mesh(workers: usize, parts: usize) -> Mesh {
    Mesh::on_one_node(Extent { workers, stages: 1, parts, servers: 0 })
}

/// A number that no other part has, with digits enough that the order of additions shows.
fn number(worker: usize, part: usize, index: usize) -> f32 {
    1.0 / (1 + 7919 * worker + 131 * part + index) as f32
}

/// Where every part's piece is, given how long each is.
fn pieces(lengths: &[usize]) -> Vec<Range<usize>> {
    let start = |part: usize| lengths[..part].iter().sum();
    (0..lengths.len()).map(|part| start(part)..start(part + 1)).collect()
}

/// Sums and gathers twice over, on all parts of two workers.
fn check(carry: Carry, lengths: &[usize], sum: usize) {
    let parts = lengths.len();
    let (mesh, pieces, whole) = (mesh(2, parts), pieces(lengths), lengths.iter().sum::<usize>());
    let mut ranks = communicators_for(carry, &options(2 * parts, None, TIMEOUT), PartLinks::GROUPS);
    let sums = on_all(&mut ranks, |world| {
        let at = mesh.coordinates(world.rank()).unwrap();
        let mut links = PartLinks::connect(world, &mesh).unwrap();
        let mut sums = Vec::new();
        for turn in 0..2 {
            let mut numbers: Vec<f32> = (0..sum).map(|index| number(at.data, at.part, index + turn)).collect();
            links.sum(&mut numbers).unwrap();
            sums.extend(numbers.iter().map(|x| x.to_bits()));
            let mut gathered = vec![f32::NAN; whole];
            let own = pieces[at.part].clone();
            gathered[own.clone()].iter_mut().zip(own).for_each(|(x, index)| *x = number(at.data, at.part, index));
            links.gather(&mut gathered, lengths).unwrap();
            for (part, piece) in pieces.iter().enumerate() {
                assert!(piece.clone().all(|index| gathered[index] == number(at.data, part, index)), "{carry:?}");
            }
        }
        sums
    });
    for worker in 0..2 {
        let found = &sums[worker * parts..(worker + 1) * parts];
        assert!(found.iter().all(|sums| *sums == found[0]), "{carry:?}: the same bits");
        for (index, &bits) in found[0][..sum].iter().enumerate() {
            let expected: f64 = (0..parts).map(|part| f64::from(number(worker, part, index))).sum();
            assert!((f64::from(f32::from_bits(bits)) - expected).abs() < 1e-6 * expected, "{carry:?} {index}");
        }
    }
}

#[test]
fn parts_sum_and_gather_over_every_carry() {
    for carry in CARRIES {
        check(carry, &[5, 4], 1000);
        check(carry, &[3, 0, 70_000, 1], 70_001);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_of_any_lengths_come_to_all(lengths in prop::collection::vec(0usize..40, 2..5), sum in 0usize..60) {
        check(Carry::Thread, &lengths, sum);
    }
}

#[test]
fn a_part_that_begins_elsewhere_or_with_other_data_is_refused() {
    for (carry, field) in CARRIES.into_iter().zip([0, 1, 7]) {
        let mesh = mesh(2, 2);
        let mut ranks = communicators_for(carry, &options(4, None, TIMEOUT), PartLinks::GROUPS);
        on_all(&mut ranks, |world| {
            let rank = world.rank();
            let mut links = PartLinks::connect(world, &mesh).unwrap();
            let mut identity = [3, 40, 0, 32, 32, 3, 10, 1280];
            // Other workers compare theirs along the data; here rank 3 is the second part of the second worker.
            identity[field] += u64::from(rank == Rank(3));
            match (rank, links.siblings().identify(identity)) {
                (Rank(3), Err(error)) => {
                    assert_eq!(error.peer(), Some(Rank(2)), "{carry:?}");
                    assert!(error.to_string().contains("another step, other data or another model"), "{error}");
                }
                (Rank(3), Ok(())) => panic!("{carry:?}: something else is known"),
                (_, found) => found.unwrap(),
            }
        });
    }
}

#[test]
fn the_first_parts_report_is_everybodys_and_votes_are_all_counted() {
    for carry in CARRIES {
        let mesh = mesh(1, 3);
        let mut ranks = communicators_for(carry, &options(3, None, TIMEOUT), PartLinks::GROUPS);
        let found = on_all(&mut ranks, |world| {
            let part = world.rank().index();
            let mut links = ReplicaLinks::Parts(Box::new(PartLinks::connect(world, &mesh).unwrap()));
            let votes = Votes { interrupted: u32::from(part == 2), ..Votes::default() };
            let loss = 2.5 + 1e-6 * part as f64;
            let total = links
                .sum_report(StepReport { rows: 8, loss, top1: 3 + part as u64, top5: 5, share: 0.5, votes })
                .unwrap();
            let mut followed = [1.0 + part as f32; 3];
            links.siblings().follow_first(&mut followed).unwrap();
            assert_eq!(followed, [1.0; 3]);
            total
        });
        assert!(found.iter().all(|report| *report == found[0]), "{carry:?}: {found:?}");
        let StepReport { rows, loss, top1, top5, votes, .. } = found[0];
        assert_eq!((rows, top1, top5, votes.interrupted), (8, 3, 5, 1), "{carry:?}");
        assert!((loss - 2.5).abs() < 1e-9, "{carry:?}: {loss}");
    }
}

#[test]
fn a_part_that_is_gone_is_named() {
    for carry in CARRIES {
        let mesh = mesh(2, 2);
        let mut ranks = communicators_for(carry, &options(4, None, TIMEOUT), PartLinks::GROUPS);
        let outcomes = on_all(&mut ranks, |world| {
            let links = PartLinks::connect(world, &mesh);
            // Rank 3, the second part of the second worker, leaves.
            if world.rank() == Rank(3) {
                return drop(links);
            }
            let sum = links.unwrap().sum(&mut [1.0; 8]);
            match world.rank() {
                Rank(2) => assert!(matches!(sum, Err(error) if error.peer() == Some(Rank(3))), "{carry:?}"),
                _ => assert!(sum.is_ok(), "{carry:?}: the other worker's parts have nothing to do with it"),
            }
        });
        assert_eq!(outcomes.len(), 4);
    }
}
