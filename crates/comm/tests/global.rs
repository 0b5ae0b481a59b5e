//! Global arrays and calls on every transport, held to plain arrays; and ranks that end.

mod world;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use paceline_comm::global::{Functions, Global, Pending, Space};
use paceline_comm::transport::Transport;
use paceline_comm::{CommError, Rank, Stop};
use proptest::prelude::*;
use world::{Carry, transports};

/// No test comes near it, on a busy machine either.
const TIMEOUT: Duration = Duration::from_secs(60);

const CARRIES: [Carry; 4] = [Carry::Thread, Carry::Shm, Carry::Tcp, Carry::TcpSecret];

fn meet(transport: Transport, functions: Functions) -> Space {
    Space::meet(transport, functions, TIMEOUT, &Stop::new()).unwrap()
}

/// Runs the body on every rank at once, each in a thread of its own; the results by rank.
fn on_links<T: Send>(carry: Carry, world: usize, body: impl Fn(Transport) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let links = transports(carry, world, 0);
        let ranks: Vec<_> = links.into_iter().map(|links| scope.spawn(|| body(links))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The same for a space without functions, whose ranks end together.
fn on_all<T: Send>(carry: Carry, world: usize, body: impl Fn(&Space) -> T + Sync) -> Vec<T> {
    on_links(carry, world, |links| {
        let space = meet(links, Functions::new());
        let result = body(&space);
        space.barrier().unwrap();
        result
    })
}

#[test]
fn every_rank_reads_what_every_rank_has_written() {
    for carry in CARRIES {
        for world in 1..=4 {
            on_all(carry, world, |space| {
                for shape in [&[1][..], &[37], &[5, 3], &[4, 3, 2], &[0], &[3, 0]] {
                    let array = space.array::<f64>(shape).unwrap();
                    let length: usize = shape.iter().product();
                    let own = array.own();
                    assert!(own.clone().all(|index| array.affinity(index) == space.rank()));
                    let mut block = array.local_mut();
                    block.iter_mut().zip(own).for_each(|(value, index)| *value = index as f64);
                    drop(block);
                    space.barrier().unwrap();
                    let all = array.get(0..length).wait().unwrap();
                    assert!(all.iter().enumerate().all(|(index, &value)| value == index as f64), "{all:?}");
                    let middle = length / 3..length - length / 4;
                    assert_eq!(array.get(middle.clone()).wait().unwrap(), all[middle]);
                    array.release().unwrap();
                }
            });
        }
    }
}

#[test]
fn more_than_all_queues_hold_goes_both_ways_at_once() {
    const LENGTH: usize = 1_200_000;
    for carry in CARRIES {
        on_all(carry, 2, |space| {
            let array = space.array::<f32>(&[2 * LENGTH]).unwrap();
            let rank = space.rank().index();
            let other = (1 - rank) * LENGTH;
            let values: Vec<f32> = (0..LENGTH).map(|index| (index * 7 % 1001 + rank) as f32).collect();
            let before = array.get(other..other + LENGTH);
            let put = array.put(other..other + LENGTH, &values);
            let after = array.get(other..other + LENGTH);
            // In the order in which they were asked for.
            assert!(before.wait().unwrap().iter().all(|&value| value == 0.0));
            put.wait().unwrap();
            assert!(after.wait().unwrap() == values);
            space.barrier().unwrap();
            assert!(
                array.local().iter().enumerate().all(|(index, &value)| value == (index * 7 % 1001 + 1 - rank) as f32)
            );
        });
    }
}

#[test]
fn tiles_come_and_go_row_by_row() {
    for world in 1..=3 {
        on_all(Carry::Thread, world, |space| {
            let array = space.array::<i64>(&[6, 5]).unwrap();
            if space.rank() == Rank(0) {
                array.put_tile(1..5, 2..4, &[1, 2, 3, 4, 5, 6, 7, 8]).wait().unwrap();
            }
            space.barrier().unwrap();
            assert_eq!(array.get_tile(2..4, 1..5).wait().unwrap(), [0, 3, 4, 0, 0, 5, 6, 0]);
            assert_eq!(array.get(array.layout().index(&[4, 3])..24).wait().unwrap(), [8]);
            assert!(array.get_tile(0..6, 3..3).wait().unwrap().is_empty());
        });
    }
}

#[test]
fn additions_of_all_ranks_count_exactly() {
    const TURNS: u64 = 300;
    for carry in CARRIES {
        for world in 1..=4 {
            let drawn = on_all(carry, world, |space| {
                let counters = space.array::<u64>(&[5]).unwrap();
                let below_zero = space.array::<i64>(&[1]).unwrap();
                let sums = space.array::<f64>(&[9]).unwrap();
                let draws: Vec<Pending<u64>> = (0..TURNS).map(|_| counters.fetch_add(4, 1)).collect();
                for _ in 0..TURNS {
                    drop(sums.accumulate(2..9, &[0.5; 7]));
                    drop(below_zero.fetch_add(0, -3));
                }
                let draws: Vec<u64> = draws.into_iter().map(|draw| draw.wait().unwrap()).collect();
                space.barrier().unwrap();
                let all = TURNS * space.world() as u64;
                assert_eq!(counters.get(0..5).wait().unwrap(), [0, 0, 0, 0, all]);
                assert_eq!(below_zero.get(0..1).wait().unwrap(), [-3 * all as i64]);
                assert_eq!(sums.get(1..4).wait().unwrap(), [0.0, 0.5 * all as f64, 0.5 * all as f64]);
                draws
            });
            let mut drawn: Vec<u64> = drawn.concat();
            drawn.sort_unstable();
            assert_eq!(drawn, (0..TURNS * world as u64).collect::<Vec<_>>(), "every number once");
        }
    }
}

#[test]
fn ranks_call_functions_on_each_other() {
    for carry in CARRIES {
        for world in 1..=3 {
            on_links(carry, world, |links| {
                let notes = Rc::new(RefCell::new(Vec::new()));
                let mut functions = Functions::new();
                let kept = Rc::clone(&notes);
                let note = functions.add("note", move |from: Rank, text: String| {
                    kept.borrow_mut().push((from, text));
                    kept.borrow().len() as u64
                });
                let divide = functions.add("divide", |_, (a, b): (i64, i64)| (b != 0).then(|| a / b.max(1)));
                let echo = functions.handlers().add("echo", |from, message| {
                    let mut arguments = message.arguments;
                    arguments[3] = from.0.into();
                    Ok(paceline_comm::global::message::Answer { arguments, payload: message.payload.to_vec() })
                });
                let space = meet(links, functions);
                let (own, next) = (space.rank(), Rank::at((space.rank().index() + 1) % world));
                for turn in 1..=3 {
                    let count = space.call(next, note, &format!("{turn} of {own}")).wait().unwrap();
                    assert_eq!(count, turn);
                }
                assert_eq!(space.call(next, divide, &(7, 2)).wait().unwrap(), Some(3));
                assert_eq!(space.call(next, divide, &(7, 0)).wait().unwrap(), None);
                let answer = space.active().request(next, echo, [1, 2, 3, 0], vec![9; 1000]).wait().unwrap();
                assert_eq!((answer.arguments, answer.payload.len()), ([1, 2, 3, own.0.into()], 1000));
                space.barrier().unwrap();
                let before = Rank::at((own.index() + world - 1) % world);
                let expected: Vec<_> = (1..=3).map(|turn| (before, format!("{turn} of {before}"))).collect();
                assert_eq!(*notes.borrow(), expected);
                space.barrier().unwrap();
            });
        }
    }
}

#[test]
fn what_follows_a_value_runs_when_it_is_there_and_may_ask_for_more() {
    for carry in CARRIES {
        on_all(carry, 3, |space| {
            // A list through the array: every element says where to go on.
            let steps = space.array::<u64>(&[30]).unwrap();
            let mut block = steps.local_mut();
            block.iter_mut().zip(steps.own()).for_each(|(value, index)| *value = (index as u64 + 11) % 30);
            drop(block);
            space.barrier().unwrap();
            let follow = |pending: Pending<Vec<u64>>| {
                let steps = steps.clone();
                pending.and_then(move |found| steps.get(found[0] as usize..found[0] as usize + 1))
            };
            let twice = follow(follow(steps.get(0..1)));
            let thrice = {
                let steps = steps.clone();
                // A function may wait, for messages.
                steps.clone().get(25..26).then(move |found| steps.get(found[0] as usize..30).wait().unwrap()[0])
            };
            assert_eq!(twice.then(|found| found[0] + 100).wait().unwrap(), 103);
            assert_eq!(thrice.wait().unwrap(), 17);
            // What is there already runs at once.
            let own = steps.own().start;
            let mut seen = steps.get(own..own + 1).then(|found| found[0]);
            assert!(seen.is_ready());
            for _ in 0..1000 {
                seen = seen.then(|number| number + 1);
            }
            assert_eq!(seen.wait().unwrap(), 1000 + (own as u64 + 11) % 30);
        });
    }
}

#[test]
fn sums_and_broadcasts_leave_the_same_bits_everywhere() {
    for carry in CARRIES {
        for world in 1..=4 {
            let found = on_all(carry, world, |space| {
                let rank = space.rank().index();
                let mut sums: Vec<f32> = (0..1003).map(|index| 0.1 * (index * 3 + rank) as f32).collect();
                space.all_reduce(&mut sums).unwrap();
                let mut largest = [rank as i64, -(rank as i64)];
                space.all_reduce_by(&mut largest, i64::max).unwrap();
                assert_eq!(largest, [world as i64 - 1, 0]);
                let mut said = [rank as u64; 5];
                space.broadcast(Rank::at(world - 1), &mut said).unwrap();
                assert_eq!(said, [world as u64 - 1; 5]);
                let array = space.array::<f64>(&[11]).unwrap();
                array.local_mut().fill(0.25);
                assert_eq!(array.sum(space).unwrap(), 2.75);
                space.all_reduce::<f32>(&mut []).unwrap();
                sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>()
            });
            let exact = |index: usize| (0..world).map(|rank| 0.1 * (index * 3 + rank) as f32).reduce(|a, b| a + b);
            let expected: Vec<u32> = (0..1003).map(|index| exact(index).unwrap().to_bits()).collect();
            assert!(found.iter().all(|bits| *bits == expected), "{carry:?}, {world} ranks");
        }
    }
}

/// Something that one rank does while the others answer.
#[derive(Clone, Debug)]
enum Deed {
    Get(usize, usize),
    Put(usize, usize, i64),
    Accumulate(usize, usize, i64),
    FetchAdd(usize, i64),
}

fn deeds() -> impl Strategy<Value = Vec<(usize, Deed)>> {
    let deed = (0..4usize, any::<prop::sample::Index>(), 0..40usize, -9..9i64).prop_map(|(kind, at, length, value)| {
        let at = at.index(1000);
        match kind {
            0 => Deed::Get(at, length),
            1 => Deed::Put(at, length, value),
            2 => Deed::Accumulate(at, length, value),
            _ => Deed::FetchAdd(at, value),
        }
    });
    prop::collection::vec((0..4usize, deed), 1..40)
}

/// Does it, and the same to a plain array; both must tell the same.
fn check(array: &Global<i64>, plain: &mut [i64], deed: &Deed, is_mine: bool) {
    let range = |at: usize, length: usize| {
        let start = at % plain.len();
        start..plain.len().min(start + length)
    };
    let fill = |length: usize, value: i64| -> Vec<i64> { (0..length as i64).map(|nth| value + nth).collect() };
    match *deed {
        Deed::Get(at, length) if is_mine => {
            let range = range(at, length);
            assert_eq!(array.get(range.clone()).wait().unwrap(), plain[range]);
        }
        Deed::Get(..) => {}
        Deed::Put(at, length, value) => {
            let range = range(at, length);
            let values = fill(range.len(), value);
            if is_mine {
                // Not waited for: the barrier does.
                drop(array.put(range.clone(), &values));
            }
            plain[range].copy_from_slice(&values);
        }
        Deed::Accumulate(at, length, value) => {
            let range = range(at, length);
            let values = fill(range.len(), value);
            if is_mine {
                drop(array.accumulate(range.clone(), &values));
            }
            plain[range].iter_mut().zip(values).for_each(|(old, more)| *old += more);
        }
        Deed::FetchAdd(at, value) => {
            let at = range(at, 1).start;
            if is_mine {
                assert_eq!(array.fetch_add(at, value).wait().unwrap(), plain[at]);
            }
            plain[at] += value;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_does_what_it_does_to_a_plain_array(
        deeds in deeds(), rows in 1usize..20, row in 1usize..6, world in 1usize..5, carry in 0usize..3,
    ) {
        on_all(CARRIES[carry], world, |space| {
            let array = space.array::<i64>(&[rows, row]).unwrap();
            let mut plain = vec![0; rows * row];
            let mut last = 0;
            for (who, deed) in &deeds {
                // Between two ranks order is kept; of another rank, a barrier says that it is through.
                let who = who % world;
                if who != last {
                    space.barrier().unwrap();
                }
                last = who;
                check(&array, &mut plain, deed, who == space.rank().index());
            }
            space.barrier().unwrap();
            assert_eq!(array.get(0..plain.len()).wait().unwrap(), plain);
        });
    }
}

#[test]
fn a_rank_that_ends_is_named_by_those_who_need_it_and_nobody_else() {
    for &carry in &CARRIES[..3] {
        on_links(carry, 3, |links| {
            let space = meet(links, Functions::new());
            let array = space.array::<u64>(&[3]).unwrap();
            space.barrier().unwrap();
            if space.rank() == Rank(1) {
                return;
            }
            let error = array.get(1..2).wait().and_then(|_| array.get(0..3).wait().and_then(|_| space.barrier()));
            let error = error.expect_err("rank 1 answers no barrier");
            assert!(matches!(error, CommError::PeerGone { .. }), "{carry:?}: {error}");
            assert_eq!(error.peer(), Some(Rank(1)), "{carry:?}: {error}");
            assert_eq!(array.put(1..2, &[1]).wait().unwrap_err().peer(), Some(Rank(1)));
            // The others go on.
            let other = 2 - space.rank().index();
            assert_eq!(array.fetch_add(other, 7).wait().unwrap(), 0);
            let started = Instant::now();
            while array.local()[0] == 0 {
                assert!(started.elapsed() < TIMEOUT, "the other adds nothing");
                space.progress().unwrap();
            }
        });
    }
}

#[test]
fn a_space_that_ends_with_values_under_way_is_gone_for_the_others() {
    for carry in CARRIES {
        on_links(carry, 2, |links| {
            let space = meet(links, Functions::new());
            let array = space.array::<u64>(&[2]).unwrap();
            space.barrier().unwrap();
            if space.rank() == Rank(0) {
                let error = space.barrier().unwrap_err();
                assert!(matches!(error, CommError::PeerGone { .. }) && error.peer() == Some(Rank(1)), "{error}");
                return;
            }
            // What is to follow holds the array, and so what the space had.
            let held = array.clone();
            let never = array.get(0..1).then(move |_| held.length());
            drop(space);
            let said = never.wait().unwrap_err().to_string() + &array.get(0..1).wait().unwrap_err().to_string();
            assert_eq!(said.matches("the space has ended").count(), 2, "{said}");
        });
    }
}

#[test]
fn what_failed_is_told_to_what_was_to_follow() {
    on_links(Carry::Thread, 2, |links| {
        let space = meet(links, Functions::new());
        let array = space.array::<u64>(&[2]).unwrap();
        if space.rank() == Rank(1) {
            return;
        }
        let ran = Rc::new(RefCell::new(false));
        let runs = Rc::clone(&ran);
        let follows = array.get(1..2).and_then(move |_| {
            *runs.borrow_mut() = true;
            array.get(0..1)
        });
        // It may have answered before it ended; whoever asks once more is told.
        if let Err(error) = follows.then(|found| found[0]).wait() {
            assert!(error.peer() == Some(Rank(1)) && !*ran.borrow(), "{error}");
        }
    });
}

/// Rank 1 of two is there and looks at nothing, while rank 0 does something with an array of which each has an element.
fn beside_a_deaf_rank(carry: Carry, stop: &Stop, body: impl Fn(&Global<u64>) + Sync) {
    let [deaf, over] = [(); 2].map(|()| {
        let (tell, told) = mpsc::channel();
        (tell, Mutex::new(told))
    });
    let hear = |from: &Mutex<mpsc::Receiver<()>>| from.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
    on_links(carry, 2, |links| {
        let space = Space::meet(links, Functions::new(), TIMEOUT, stop).unwrap();
        let array = space.array::<u64>(&[2]).unwrap();
        space.barrier().unwrap();
        if space.rank() == Rank(1) {
            deaf.0.send(()).unwrap();
            hear(&over.1);
        } else {
            // At the end of a barrier it still answers.
            hear(&deaf.1);
            body(&array);
            over.0.send(()).unwrap();
        }
    });
}

#[test]
fn who_does_not_answer_is_named_when_the_deadline_passes() {
    for carry in CARRIES {
        beside_a_deaf_rank(carry, &Stop::new(), |array| {
            let error = array.get(1..2).wait_at_most(Duration::from_millis(200)).unwrap_err();
            assert!(matches!(error, CommError::DeadlinePassed { phase: "get", .. }), "{carry:?}: {error}");
            assert_eq!(error.peer(), Some(Rank(1)));
        });
    }
}

#[test]
fn a_stop_ends_a_wait() {
    for carry in CARRIES {
        let stop = Stop::new();
        beside_a_deaf_rank(carry, &stop, |array| {
            stop.set("asked to");
            let error = array.get(1..2).wait().unwrap_err();
            assert!(matches!(&error, CommError::Stopped { reason, .. } if reason == "asked to"), "{error}");
        });
    }
}

#[test]
fn ranks_with_other_functions_or_shapes_notice() {
    for carry in [Carry::Thread, Carry::Tcp] {
        let errors = on_links(carry, 2, |links| {
            let mut functions = Functions::new();
            let is_first = matches!(&links, Transport::Thread(port) if port.rank() == Rank(0))
                || matches!(&links, Transport::Tcp(port) if port.rank() == Rank(0));
            let _ = functions.add(if is_first { "one" } else { "another" }, |_, ()| ());
            Space::meet(links, functions, TIMEOUT, &Stop::new()).err()
        });
        let violation = |error: &Option<CommError>| matches!(error, Some(CommError::Protocol { .. }));
        assert!(errors.iter().any(violation), "{errors:?}");
        let errors = on_links(carry, 2, |links| {
            let space = meet(links, Functions::new());
            space.array::<u64>(&[space.rank().index() + 3]).err()
        });
        assert!(errors.iter().any(violation), "{errors:?}");
    }
}

#[test]
fn the_page_shows_the_program_that_is_tested() {
    let [page, code] = ["../../docs/global.md", "src/global.rs"]
        .map(|path| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap());
    let program = |text: &str| {
        let body = text.split("fn rank(").nth(1).unwrap().split("\n}").next().unwrap().to_owned();
        body.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    let commented: Vec<&str> = code
        .lines()
        .filter_map(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .collect();
    assert_eq!(program(&page), program(&commented.join("\n")));
}
