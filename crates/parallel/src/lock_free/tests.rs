//! Every interleaving of a few loads and stores, by the buffer's own code: threads wait for their turn before
//! each of them. And what real threads may see, as they come.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::*;

/// An atomic word. A thread that takes turns touches it when its own has come.
#[derive(Debug)]
pub(super) struct Word(AtomicU32);

impl Word {
    pub fn new(bits: u32) -> Self {
        Self(AtomicU32::new(bits))
    }

    pub fn load(&self, order: Ordering) -> u32 {
        in_turn(|| self.0.load(order))
    }

    pub fn store(&self, bits: u32, order: Ordering) {
        in_turn(|| self.0.store(bits, order));
    }
}

/// Whose turn it is: the threads' numbers, one after the other.
struct Turns {
    order: Vec<usize>,
    next: Mutex<usize>,
    changed: Condvar,
}

thread_local! {
    static SEAT: RefCell<Option<(Arc<Turns>, usize)>> = const { RefCell::new(None) };
}

fn in_turn<T>(touch: impl FnOnce() -> T) -> T {
    let Some((turns, own)) = SEAT.with_borrow(Clone::clone) else { return touch() };
    let next = turns.next.lock().unwrap_or_else(PoisonError::into_inner);
    let waits = |next: &mut usize| turns.order.get(*next).is_some_and(|&turn| turn != own);
    let mut next = turns.changed.wait_while(next, waits).unwrap_or_else(PoisonError::into_inner);
    let touched = touch();
    *next += 1;
    turns.changed.notify_all();
    touched
}

/// Runs threads whose loads and stores take turns in this order.
pub(crate) fn interleaved(order: &[usize], threads: &mut [&mut (dyn FnMut() + Send)]) {
    let turns = Arc::new(Turns { order: order.to_vec(), next: Mutex::new(0), changed: Condvar::new() });
    std::thread::scope(|scope| {
        for (own, thread) in threads.iter_mut().enumerate() {
            let turns = Arc::clone(&turns);
            scope.spawn(move || {
                SEAT.set(Some((turns, own)));
                thread();
            });
        }
    });
    let made = *turns.next.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(made, order.len(), "as many loads and stores as were expected");
}

/// Every order of so many turns of each of two threads.
pub(crate) fn orders(counts: [usize; 2]) -> Vec<Vec<usize>> {
    if counts == [0, 0] {
        return vec![vec![]];
    }
    let mut all = Vec::new();
    for thread in (0..2).filter(|&thread| counts[thread] > 0) {
        let mut left = counts;
        left[thread] -= 1;
        all.extend(orders(left).into_iter().map(|rest| [vec![thread], rest].concat()));
    }
    all
}

/// Where the nth turn of a thread stands in an order.
fn position(order: &[usize], thread: usize, nth: usize) -> usize {
    order.iter().enumerate().filter(|(_, turn)| **turn == thread).nth(nth).unwrap().0
}

#[test]
fn in_every_interleaving_a_change_is_added_or_lost_to_a_later_store() {
    const CHANGES: [f32; 2] = [1.0, 10.0];
    let mut found = [0; 3];
    for order in orders([4, 4]) {
        let buffer = &LockFreeBuffer::new(&[0.0; 2]);
        let mut own = CHANGES.map(|change| [change; 2]);
        let [mut one, mut other] = own.each_mut().map(|own| move || buffer.exchange(&mut [0.0; 2], own));
        interleaved(&order, &mut [&mut one, &mut other]);
        for element in 0..2 {
            let [loads, stores] = [0, 1].map(|half| [0, 1].map(|thread| position(&order, thread, 2 * element + half)));
            // What each has stored: its change, behind the other's if that was there when it looked.
            let stored = [0, 1].map(|thread| {
                let other = 1 - thread;
                CHANGES[thread] + if loads[thread] > stores[other] { CHANGES[other] } else { 0.0 }
            });
            assert_eq!(own.map(|own| own[element]), stored, "{order:?}");
            let last = stored[usize::from(stores[1] > stores[0])];
            assert_eq!(buffer.load(element), last, "{order:?}");
            found[[1.0, 10.0, 11.0].iter().position(|&value| value == last).unwrap()] += 1;
        }
    }
    assert!(found[0] == found[1] && found.iter().all(|&count| count > 0), "either may be lost, or none: {found:?}");
}

#[test]
fn what_did_not_change_takes_nothing_from_others() {
    for order in orders([3, 4]) {
        let buffer = LockFreeBuffer::new(&[5.0, 5.0]);
        // The first thread changes the second element alone.
        let mut one = || buffer.exchange(&mut [5.0; 2], &mut [5.0, 6.0]);
        let mut other = || buffer.exchange(&mut [5.0; 2], &mut [7.0, 7.0]);
        interleaved(&order, &mut [&mut one, &mut other]);
        assert_eq!(buffer.load(0), 7.0, "{order:?}");
        assert!([6.0, 7.0, 8.0].contains(&buffer.load(1)), "{order:?}");
    }
}

#[test]
fn additions_in_turn_are_all_there() {
    let buffer = LockFreeBuffer::new(&[0.0; 3]);
    for step in 0..100 {
        let order = vec![step % 2; 6];
        let mut add = || (0..3).for_each(|index| buffer.add(index, 1.0));
        let mut nothing = || {};
        let mut threads: [&mut (dyn FnMut() + Send); 2] = [&mut add, &mut nothing];
        threads.rotate_left(step % 2);
        interleaved(&order, &mut threads);
    }
    let mut values = [0.0; 3];
    buffer.load_all(&mut values);
    assert_eq!(values, [100.0; 3]);
}

#[test]
fn one_thread_has_the_bits_that_it_would_have_without_a_buffer() {
    let mut plain: Vec<f32> = (1..1000).map(|index| (index as f32).sin() * 10f32.powi(index % 9 - 4)).collect();
    let buffer = LockFreeBuffer::new(&plain);
    let (mut seen, mut own) = (plain.clone(), plain.clone());
    for step in 0..50 {
        let walk = |value: &mut f32| *value -= 0.013 * (*value - step as f32 * 1e-3);
        plain.iter_mut().for_each(walk);
        own.iter_mut().for_each(walk);
        buffer.exchange(&mut seen, &mut own);
        assert!(own == plain && seen == plain, "step {step}");
    }
    let mut found = vec![0.0; plain.len()];
    buffer.load_all(&mut found);
    assert_eq!(found, plain);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&found), bits(&plain));
}

/// Both halves of a word say the same.
fn whole(half: u32) -> f32 {
    f32::from_bits(half << 16 | half)
}

#[test]
fn real_threads_see_only_what_somebody_has_stored() {
    let buffer = LockFreeBuffer::new(&[whole(1); 64]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                let buffer = &buffer;
                scope.spawn(move || {
                    for round in 0..4000u32 {
                        // Numbers between the least and 2⁶⁴, none of them special.
                        let half = |at| 0x100 + (round * 64 + at) % 0x5e00 + writer;
                        let values: Vec<f32> = (0..64).map(|at| whole(half(at))).collect();
                        buffer.store_all(&values);
                        buffer.count_update();
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let mut values = [0.0; 64];
            while !done.load(Ordering::Relaxed) {
                buffer.load_all(&mut values);
                for bits in values.map(f32::to_bits) {
                    assert_eq!(bits >> 16, bits & 0xffff, "a torn value");
                }
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(buffer.updates(), 8000);
}
