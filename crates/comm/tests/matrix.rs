//! Every collective by every algorithm over every transport, for worlds from 1 to 8 and lengths from nothing to a
//! million, against sums made the slow and clear way. All ranks must hold the same bits.

mod world;

use paceline_comm::reduce::{round_bf16, widen_bf16};
use paceline_comm::{Algorithm, Collective, CommError, Rank};
use world::{Carry, LENGTHS, TIMEOUT, check, check_bf16, communicators, expected, input, on_all, options};

const WORLDS: [usize; 7] = [1, 2, 3, 4, 5, 7, 8];

fn matrix(carry: Carry) {
    for world in WORLDS {
        let mut ranks = communicators(carry, &options(world, None, TIMEOUT));
        let links = ranks[0].choice().links().clone();
        for collective in Collective::ALL {
            for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.supports(collective, world)) {
                for length in LENGTHS {
                    let length = if collective == Collective::AllToAll { length / world * world } else { length };
                    let choice = paceline_comm::Choice::by_cost(links.clone()).forced(Some(algorithm));
                    on_all(&mut ranks, |comm| {
                        comm.set_choice(choice.clone());
                        check(comm, collective, length, &format!("{algorithm} on {carry:?}"));
                        if collective == Collective::AllReduce {
                            check_bf16(comm, length, &format!("{algorithm} on {carry:?}"));
                        }
                    });
                }
            }
        }
    }
}

#[test]
fn collectives_by_every_algorithm_over_threads() {
    matrix(Carry::Thread);
}

#[test]
fn collectives_by_every_algorithm_over_shared_memory() {
    matrix(Carry::Shm);
}

#[test]
fn collectives_by_every_algorithm_over_sockets() {
    matrix(Carry::Tcp);
}

#[test]
#[ignore = "cargo x ci: matrix"]
fn collectives_by_every_algorithm_over_several_sockets_for_each_pair() {
    matrix(Carry::TcpStriped);
}

#[test]
#[ignore = "cargo x ci: matrix"]
fn collectives_by_every_algorithm_over_encrypted_sockets() {
    matrix(Carry::TcpSecret);
}

#[test]
fn rounded_sums_are_the_same_bits_on_all_ranks() {
    for carry in Carry::ALL {
        for world in [2, 3, 8] {
            for algorithm in Algorithm::ALL {
                let mut ranks = communicators(carry, &options(world, Some(algorithm), TIMEOUT));
                let results = on_all(&mut ranks, |comm| {
                    let value = |index: usize| ((comm.rank().index() + 3) * (index + 1)) as f32 * 0.37;
                    let mut numbers: Vec<f32> = (0..1001).map(value).collect();
                    let mut halves: Vec<u16> = numbers.iter().map(|&number| round_bf16(number)).collect();
                    comm.all_reduce(&mut numbers).unwrap();
                    comm.all_reduce_bf16(&mut halves).unwrap();
                    (numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>(), halves)
                });
                for (numbers, halves) in &results {
                    assert_eq!((numbers, halves), (&results[0].0, &results[0].1), "{algorithm} on {carry:?}");
                    for (index, (&bits, &half)) in numbers.iter().zip(halves).enumerate() {
                        let exact: f64 = (0..world).map(|rank| ((rank + 3) * (index + 1)) as f64 * 0.37).sum();
                        assert!((f64::from(f32::from_bits(bits)) / exact - 1.0).abs() < 1e-5);
                        assert!((f64::from(widen_bf16(half)) / exact - 1.0).abs() < 0.03, "{half} {exact}");
                    }
                }
            }
        }
    }
}

#[test]
fn registered_buffers_are_reduced_where_they_lie() {
    for carry in [Carry::Thread, Carry::Shm] {
        for world in [1, 2, 3, 5] {
            let mut ranks = communicators(carry, &options(world, None, TIMEOUT));
            on_all(&mut ranks, |comm| {
                for length in LENGTHS {
                    let rank = comm.rank().index();
                    let mut buffer = comm.register_buffer(length).unwrap();
                    buffer.as_mut_slice().copy_from_slice(&input(rank, length));
                    let part = length / 3..length;
                    comm.all_reduce_registered(&mut buffer, part.clone()).unwrap();
                    let sums = expected(Collective::AllReduce, rank, world, length).1;
                    assert_eq!(buffer.as_slice()[part.clone()], sums[part.clone()]);
                    assert_eq!(buffer.as_slice()[..part.start], input(rank, length)[..part.start]);
                    comm.barrier().unwrap();
                }
            });
        }
    }
}

#[test]
fn ranks_that_reduce_different_registered_buffers_notice_and_lose_them() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, TIMEOUT));
    on_all(&mut ranks, |comm| {
        let mut buffers = [(); 2].map(|()| comm.register_buffer(10).unwrap());
        let error = comm.all_reduce_registered(&mut buffers[comm.rank().index()], 0..10).unwrap_err();
        assert!(matches!(error, CommError::Protocol { .. }), "{error}");
        let lost = &buffers[comm.rank().index()];
        assert!(std::panic::catch_unwind(|| lost.as_slice().len()).is_err(), "the other may still write there");
        assert_eq!(buffers[1 - comm.rank().index()].as_slice(), [0.0; 10]);
    });
}

#[test]
fn a_buffer_that_another_communicator_has_registered_is_reduced_all_the_same() {
    let mut worlds = [(); 2].map(|()| communicators(Carry::Shm, &options(2, None, TIMEOUT)));
    let mut buffers: Vec<_> = worlds[0].iter_mut().map(|comm| comm.register_buffer(10).unwrap()).collect();
    std::thread::scope(|scope| {
        for (comm, buffer) in worlds[1].iter_mut().zip(&mut buffers) {
            scope.spawn(move || {
                buffer.as_mut_slice().fill(1.0 + comm.rank().0 as f32);
                comm.all_reduce_registered(buffer, 0..10).unwrap();
                assert_eq!(buffer.as_slice(), [3.0; 10]);
            });
        }
    });
}

#[test]
fn a_list_of_the_callers_own_moves_and_adds_halves() {
    use paceline_comm::{Action, Transfer};
    for carry in Carry::ALL {
        let mut ranks = communicators(carry, &options(2, None, TIMEOUT));
        on_all(&mut ranks, |comm| {
            let (rank, peer) = (comm.rank().0, Rank(1 - comm.rank().0));
            let of = |action, start| Transfer { step: 0, action, peer, start, length: 9999 };
            // Each adds the other's first part to its second.
            let mut halves = vec![round_bf16(1.0 + rank as f32); 2 * 9999];
            comm.exchange_bf16(&[of(Action::Send, 0), of(Action::Reduce, 9999)], 5, &mut halves).unwrap();
            assert!(halves[..9999].iter().all(|&half| widen_bf16(half) == 1.0 + rank as f32), "{carry:?}");
            assert!(halves[9999..].iter().all(|&half| widen_bf16(half) == 3.0), "{carry:?}");
            // Numbers and halves are told apart.
            let mixed = match rank {
                0 => comm.exchange(&[of(Action::Send, 0)], 6, &mut [0.0; 9999]),
                _ => comm.exchange_bf16(&[Transfer { length: 2 * 9999, ..of(Action::Receive, 0) }], 6, &mut halves),
            };
            assert!(rank == 0 || matches!(mixed, Err(CommError::Protocol { .. })), "{carry:?}: {mixed:?}");
        });
    }
}

#[test]
fn two_ranks_exchange_tagged_messages_and_a_server_hears_whoever_comes_first() {
    for carry in Carry::ALL {
        let mut ranks = communicators(carry, &options(3, None, TIMEOUT));
        on_all(&mut ranks, |comm| {
            let large = 3_000_001;
            if comm.rank() == Rank(0) {
                let mut waiting = vec![Rank(1), Rank(2)];
                while !waiting.is_empty() {
                    let from = comm.wait_any(&waiting).unwrap();
                    let mut bytes = vec![0; large];
                    comm.recv(from, 7, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|&byte| byte == from.0 as u8));
                    comm.send(from, 8, &bytes).unwrap();
                    waiting.retain(|&rank| rank != from);
                }
            } else {
                let mut bytes = vec![comm.rank().0 as u8; large];
                comm.send(Rank(0), 7, &bytes).unwrap();
                comm.recv(Rank(0), 8, &mut bytes).unwrap();
            }
            comm.barrier().unwrap();
        });
    }
}
