//! The matrix of collectives over MPI: the library's own, and every algorithm over its messages. `mpirun` starts this program as
//! each rank; `cargo x mpi` starts `mpirun`.

mod world;

use paceline_comm::reduce::{round_bf16, widen_bf16};
use paceline_comm::transport::{Membership, Transport, mpi};
use paceline_comm::{Algorithm, Collective, Communicator, Generation, Rank, RunId, Token, probe};
use world::{LENGTHS, TIMEOUT, check, check_bf16, check_groups, check_groups_at_once, options};

/// What OpenMPI or MPICH says of this process.
fn variable(names: [&str; 2]) -> Option<usize> {
    names.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

fn main() {
    let place = (variable(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]), variable(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]));
    let (Some(rank), Some(world)) = place else {
        println!("skipped: the matrix over MPI (needs `mpirun`; type cargo x mpi)");
        return;
    };
    let rank = Rank::at(rank);
    let membership =
        Membership { token: Token::random(), run: RunId::UNKNOWN, rank, world, generation: Generation::default() };
    let port = mpi::connect(&membership).unwrap();
    let window = port.window(4096).unwrap();
    let mut comm = Communicator::new(Transport::Mpi(Box::new(port)), options(world, None, TIMEOUT));
    one_sided(&mut comm, window);
    // Two rows of several need four ranks; more than that are there for groups.
    if world <= 4 {
        every_algorithm(&mut comm);
        rounded_sums_are_the_same(&mut comm);
        messages_come_in_order(&mut comm);
    }
    if world >= 4 && world.is_multiple_of(2) {
        check_groups(&mut comm, "MPI");
        check_groups_at_once(&mut comm, "MPI, at once");
    }
    groups_are_numbered_anew(&mut comm);
    let link = probe::links(&mut comm, paceline_comm::Nodes::one(world)).unwrap().within;
    // MPI can be started once.
    assert!(mpi::connect(&membership).unwrap_err().to_string().contains("before"));
    comm.barrier().unwrap();
    if rank == Rank(0) {
        let (latency, speed) = (link.latency_s * 1e6, 1e-9 / link.seconds_per_byte);
        println!("mpi: every collective over {world} ranks is right; messages: {latency:.1} µs, {speed:.2} GB/s");
    }
}

fn every_algorithm(comm: &mut Communicator) {
    let (world, by_cost) = (comm.world(), comm.choice().clone());
    for algorithm in std::iter::once(None).chain(Algorithm::ALL.map(Some)) {
        comm.set_choice(by_cost.clone().forced(algorithm));
        let how = algorithm.map_or("MPI itself", Algorithm::name);
        for collective in Collective::ALL {
            for length in LENGTHS {
                let length = if collective == Collective::AllToAll { length / world * world } else { length };
                check(comm, collective, length, how);
            }
        }
        for length in LENGTHS {
            check_bf16(comm, length, how);
        }
    }
    comm.set_choice(by_cost);
}

/// Every rank reads, writes and adds where the others do nothing.
fn one_sided(comm: &mut Communicator, window: mpi::Window) {
    let (rank, world) = (comm.rank().index(), comm.world());
    let next = (rank + 1) % world;
    window.put(next, 8 * rank, &(rank as u64).to_le_bytes()).unwrap();
    (0..world).for_each(|other| window.accumulate(other, 1024, &[1.0, 0.5, rank as f32]).unwrap());
    let mine: Vec<i64> = (0..100).map(|_| window.fetch_add(0, 2048, 1).unwrap()).collect();
    assert!(mine.windows(2).all(|pair| pair[0] < pair[1]));
    comm.barrier().unwrap();
    let mut found = [0; 8];
    let before = (rank + world - 1) % world;
    window.get(rank, 8 * before, &mut found).unwrap();
    assert_eq!(u64::from_le_bytes(found), before as u64);
    let mut sums = [0f32; 3];
    window.get(next, 1024, bytemuck::cast_slice_mut(&mut sums)).unwrap();
    let all = world as f32;
    assert_eq!(sums, [all, 0.5 * all, all * (all - 1.0) / 2.0]);
    assert_eq!(window.fetch_add(0, 2048, 0).unwrap(), 100 * world as i64);
    assert!(window.get(world, 0, &mut found).is_err() && window.put(0, 4090, &found).is_err());
    comm.barrier().unwrap();
    window.free().unwrap();
}

/// All ranks backwards, and errors that name them as the world does.
fn groups_are_numbered_anew(comm: &mut Communicator) {
    let members: Vec<Rank> = (0..comm.world()).rev().map(Rank::at).collect();
    let mut group = comm.group(&members).unwrap();
    assert_eq!(group.rank().index(), comm.world() - 1 - comm.rank().index());
    check(&mut group, Collective::AllGather, 7919, "MPI, backwards");
    check_bf16(&mut group, 7919, "MPI, backwards");
    if comm.world() > 2 {
        // Some ranks make a group and the others do not.
        let (first, others) = members.split_first().unwrap();
        if comm.rank() != *first {
            check(&mut comm.group(others).unwrap(), Collective::AllReduce, 7919, "MPI, all but the last");
        }
    }
    comm.barrier().unwrap();
    // The last rank says nothing: the others wait for it in vain.
    let (rank, last) = (comm.rank(), Rank::at(comm.world() - 1));
    let mut hasty = group.group(&(0..comm.world()).map(Rank::at).collect::<Vec<_>>()).unwrap();
    hasty.set_timeout(std::time::Duration::from_millis(200));
    if rank == Rank(0) {
        let error = hasty.recv(Rank(0), 1, &mut [0; 3]).unwrap_err();
        assert!(error.peer() == Some(last) && error.to_string().starts_with("rank 0 waited"), "{error}");
    }
    comm.barrier().unwrap();
}

/// Numbers whose sums are rounded: all ranks hold the bits of rank 0.
fn rounded_sums_are_the_same(comm: &mut Communicator) {
    let (rank, world) = (comm.rank().index(), comm.world());
    let mut numbers: Vec<f32> = (0..5000).map(|index| ((rank + 3) * (index + 1)) as f32 * 0.37).collect();
    let mut halves: Vec<u16> = numbers.iter().map(|&number| round_bf16(number)).collect();
    comm.all_reduce(&mut numbers).unwrap();
    comm.all_reduce_bf16(&mut halves).unwrap();
    for (index, (&number, &half)) in numbers.iter().zip(&halves).enumerate() {
        let exact: f64 = (0..world).map(|rank| ((rank + 3) * (index + 1)) as f64 * 0.37).sum();
        assert!((f64::from(number) / exact - 1.0).abs() < 1e-5);
        assert!((f64::from(widen_bf16(half)) / exact - 1.0).abs() < 0.03);
    }
    let (mut first, mut first_halves) = (numbers.clone(), bytes(&halves));
    comm.broadcast(Rank(0), &mut first).unwrap();
    comm.broadcast_bytes(Rank(0), &mut first_halves).unwrap();
    assert!(first.iter().zip(&numbers).all(|(a, b)| a.to_bits() == b.to_bits()) && first_halves == bytes(&halves));
}

fn bytes(halves: &[u16]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

/// Short and long messages in a row to rank 0, which hears whoever comes first.
fn messages_come_in_order(comm: &mut Communicator) {
    let lengths = [1, 3_000_001, 5, 300_000];
    if comm.rank() != Rank(0) {
        for (tag, length) in lengths.into_iter().enumerate() {
            comm.send(Rank(0), tag as u64, &vec![tag as u8 + comm.rank().0 as u8; length]).unwrap();
        }
        return;
    }
    let mut left: Vec<Rank> = (1..comm.world()).map(Rank::at).collect();
    while !left.is_empty() {
        let from = comm.wait_any(&left).unwrap();
        for (tag, length) in lengths.into_iter().enumerate() {
            let mut bytes = vec![0; length];
            comm.recv(from, tag as u64, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == tag as u8 + from.0 as u8));
        }
        left.retain(|&rank| rank != from);
    }
}
