//! Groups of ranks: rows and columns of a mesh, each with messages, sums and memory of its own, beside each
//! other and beside the world; and faults in them, which name ranks as the user knows them.

mod world;

use std::time::Duration;

use paceline_comm::{CommError, Communicator, OneCopyShape, Rank};
use world::{
    Carry, TIMEOUT, check_groups, check_groups_at_once, communicators, communicators_for, expected_of, input, on_all,
    options, row_and_column,
};

const SHORT: Duration = Duration::from_millis(300);

fn matrix(carry: Carry) {
    for world in [4, 6] {
        let mut ranks = communicators_for(carry, &options(world, None, TIMEOUT), 2);
        on_all(&mut ranks, |comm| {
            check_groups(comm, &format!("{carry:?}"));
            check_groups_at_once(comm, &format!("{carry:?} at once"));
        });
    }
}

#[test]
fn rows_and_columns_over_threads() {
    matrix(Carry::Thread);
}

#[test]
fn rows_and_columns_over_shared_memory() {
    matrix(Carry::Shm);
}

#[test]
fn rows_and_columns_over_sockets() {
    matrix(Carry::Tcp);
}

#[test]
fn rows_and_columns_over_encrypted_sockets() {
    matrix(Carry::TcpSecret);
}

#[test]
fn members_are_numbered_in_the_order_given_and_groups_have_groups() {
    for carry in Carry::ALL {
        let mut ranks = communicators_for(carry, &options(5, None, TIMEOUT), 2);
        on_all(&mut ranks, |comm| {
            let members = [4, 0, 3].map(Rank);
            let Some(place) = members.iter().position(|&member| member == comm.rank()) else { return };
            let mut group = comm.group(&members).unwrap();
            assert_eq!((group.rank(), group.world()), (Rank::at(place), 3));
            assert_eq!((0..3).map(|rank| group.world_rank(Rank(rank))).collect::<Vec<_>>(), members);
            let mut bytes = [comm.rank().0 as u8];
            group.broadcast_bytes(Rank(2), &mut bytes).unwrap();
            assert_eq!(bytes, [3], "the third is rank 3");
            if place > 0 {
                let mut inner = group.group(&[Rank(2), Rank(1)]).unwrap();
                assert_eq!((inner.world_rank(Rank(0)), inner.world_rank(Rank(1))), (Rank(3), Rank(0)));
                let mut sum = [1.0 + comm.rank().0 as f32];
                inner.all_reduce(&mut sum).unwrap();
                assert_eq!(sum, [5.0]);
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_rank_can_be_a_group_of_its_own() {
    for carry in Carry::ALL {
        let mut ranks = communicators(carry, &options(2, None, TIMEOUT));
        on_all(&mut ranks, |comm| {
            let mut alone = comm.group(&[comm.rank()]).unwrap();
            let mut number = [comm.rank().0 as f32];
            alone.all_reduce(&mut number).unwrap();
            alone.barrier().unwrap();
            assert_eq!((number, alone.rank(), alone.world()), ([comm.rank().0 as f32], Rank(0), 1));
            comm.barrier().unwrap();
        });
    }
}

/// Registered buffers and one copy of weights inside a row and a column, beside each other.
#[test]
fn memory_is_shared_inside_groups() {
    let mut ranks = communicators(Carry::Shm, &options(6, None, TIMEOUT));
    on_all(&mut ranks, |comm| {
        let mut groups = row_and_column(comm.rank(), comm.world()).map(|members| comm.group(&members).unwrap());
        let length = 5000;
        let whole = 0..length;
        let buckets = std::slice::from_ref(&whole);
        let shape = OneCopyShape { elements: length, buckets, piece_elements: 700, slots: 0, sums: 1 };
        let mut regions = groups.each_mut().map(|group| group.one_copy(&shape).unwrap().unwrap());
        let mut buffers = groups.each_mut().map(|group| group.register_buffer(length).unwrap());
        for round in 1..20 {
            for ((group, region), buffer) in groups.iter_mut().zip(&mut regions).zip(&mut buffers) {
                let names: Vec<usize> =
                    (0..group.world()).map(|rank| group.world_rank(Rank::at(rank)).index()).collect();
                let own = input(comm.rank().index(), length);
                let sums = expected_of(paceline_comm::Collective::AllReduce, 0, &names, length).1;
                buffer.as_mut_slice().copy_from_slice(&own);
                group.all_reduce_registered(buffer, 0..length).unwrap();
                assert!(buffer.is_shared() && buffer.as_slice() == sums);
                region.write_gradients(0, &own);
                region.arrive(0);
                while !region.is_finished(0) {
                    let Some(mut piece) = region.take(0).unwrap() else {
                        region.wait_for_progress(0, &group.wait()).unwrap();
                        continue;
                    };
                    let mut sums = vec![0.0; piece.range().len()];
                    piece.sum_gradients(&mut sums);
                    piece.weights().iter_mut().zip(sums).for_each(|(weight, sum)| *weight += sum);
                    piece.finish();
                }
                let weights: Vec<f32> = sums.iter().map(|sum| sum * round as f32).collect();
                assert!(region.weights(0) == weights, "{names:?}, round {round}");
            }
        }
        comm.barrier().unwrap();
    });
}

/// Ranks 3, 1 and 2 of four are a group; what each says of it.
fn in_a_group<T: Send>(
    carry: Carry,
    timeout: Duration,
    body: impl Fn(&mut Communicator, Rank) -> Option<T> + Sync,
) -> Vec<Option<T>> {
    let mut ranks = communicators_for(carry, &options(4, None, timeout), 1);
    on_all(&mut ranks, |comm| {
        let members = [3, 1, 2].map(Rank);
        if !members.contains(&comm.rank()) {
            return None;
        }
        let mut group = comm.group(&members).unwrap();
        body(&mut group, comm.rank())
    })
}

#[test]
fn a_member_that_leaves_is_named_by_its_rank_in_the_world() {
    for carry in Carry::ALL {
        let errors = in_a_group(carry, TIMEOUT, |group, rank| {
            group.barrier().unwrap();
            // Number 0 of the group leaves.
            (rank != Rank(3)).then(|| group.all_reduce(&mut vec![1.0; 100_000]).unwrap_err())
        });
        let said: Vec<String> = errors.iter().flatten().map(ToString::to_string).collect();
        assert!(errors.iter().flatten().any(|error| error.peer() == Some(Rank(3))), "{carry:?}: {said:?}");
        assert!(errors.iter().flatten().all(|error| error.peer() != Some(Rank(0))), "{carry:?}: {said:?}");
        assert!(said.iter().any(|said| said.contains("lost rank 3")), "{carry:?}: {said:?}");
        assert!(said[0].starts_with("rank 1 ") && said[1].starts_with("rank 2 "), "{carry:?}: {said:?}");
    }
}

#[test]
fn a_member_that_stalls_is_named_by_its_rank_in_the_world() {
    for carry in Carry::ALL {
        let errors = in_a_group(carry, SHORT, |group, rank| {
            let started = std::time::Instant::now();
            let error = (rank == Rank(1)).then(|| group.recv(Rank(0), 1, &mut [0; 10]).unwrap_err());
            while rank == Rank(3) && started.elapsed() < 2 * SHORT {
                std::thread::sleep(Duration::from_millis(10));
            }
            let again = (rank == Rank(1)).then(|| group.barrier().unwrap_err().to_string());
            assert!(again.is_none_or(|again| again.starts_with("rank 1 cannot go on")));
            error
        });
        let error = errors[1].as_ref().unwrap();
        assert!(
            matches!(error, CommError::DeadlinePassed { .. }) && error.peer() == Some(Rank(3)),
            "{carry:?}: {error}"
        );
        assert!(error.to_string().starts_with("rank 1 waited"), "{carry:?}: {error}");
    }
}

#[test]
fn a_stop_ends_the_waits_of_groups_too() {
    for carry in Carry::ALL {
        let options = options(2, None, Duration::from_secs(1000));
        let mut ranks = communicators_for(carry, &options, 1);
        on_all(&mut ranks, |comm| {
            let mut group = comm.group(&[Rank(1), Rank(0)]).unwrap();
            if comm.rank() == Rank(0) {
                options.stop.set("rank 9 is gone");
            }
            let error = group.recv(Rank(1 - group.rank().0), 1, &mut [0]).unwrap_err();
            let said = format!("{} was stopped in recv: rank 9 is gone", comm.rank());
            assert!(error.to_string() == said || matches!(error, CommError::PeerGone { .. }), "{carry:?}: {error}");
        });
    }
}

#[test]
fn members_that_name_different_members_notice() {
    for carry in Carry::ALL {
        let mut ranks = communicators_for(carry, &options(3, None, SHORT), 1);
        let errors = on_all(&mut ranks, |comm| {
            let members = if comm.rank() == Rank(2) { [0, 2, 1] } else { [0, 1, 2] };
            comm.group(&members.map(Rank)).unwrap_err()
        });
        assert!(
            matches!(errors[0], CommError::Protocol { .. }) && errors[0].peer() == Some(Rank(2)),
            "{carry:?}: {errors:?}"
        );
    }
}

#[test]
fn a_group_for_which_no_connection_is_left_is_refused_by_name() {
    for carry in [Carry::Tcp, Carry::TcpSecret] {
        let mut ranks = communicators_for(carry, &options(3, None, TIMEOUT), 1);
        on_all(&mut ranks, |comm| {
            let all = [0, 1, 2].map(Rank);
            let mut group = comm.group(&all).unwrap();
            let error = comm.group(&all).unwrap_err().to_string();
            assert!(error.contains("make another group: no connection to rank"), "{error}");
            comm.barrier().unwrap();
            group.barrier().unwrap();
        });
    }
}
