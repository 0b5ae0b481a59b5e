//! Numbers by hand: S bytes of gradients over links of B bytes a second, without latency, so that S ÷ B is a second.

use paceline_comm::collective::Algorithm;
use paceline_comm::cost::Links;
use proptest::prelude::*;

use super::*;

/// Workers that all-reduce by a ring, over links that carry four million elements a second.
fn workers(count: usize, latency_s: f64) -> Workers {
    let link = Link::new(latency_s, 16e6);
    let choice = Choice::by_cost(Links::uniform(count, link)).forced(Some(Algorithm::Ring));
    Workers { count, link, choice }
}

/// So many buckets of four million elements together, final one after the other and needed in the opposite order.
fn step(compute_s: f64, buckets: usize) -> StepTimes {
    let part = |index: usize| compute_s * (index + 1) as f64 / buckets as f64;
    let of = |index: usize| BucketTimes {
        ready_s: compute_s / 3.0 + part(index) * 2.0 / 3.0,
        needed_s: compute_s * (buckets - 1 - index) as f64 / buckets as f64 / 3.0,
        elements: 4_000_000 / buckets,
    };
    StepTimes { compute_s, buckets: (0..buckets).map(of).collect() }
}

fn seconds_of(way: Way, count: usize, times: &StepTimes) -> f64 {
    workers(count, 0.0).forecast(way, times).step_s
}

fn near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-3, "{found} where {expected} was expected");
}

#[test]
fn without_computing_a_step_takes_what_the_formulas_say() {
    let times = step(1e-9, 400);
    for p in [2, 4, 6] {
        let workers = p as f64;
        near(seconds_of(Way::AllReduce, p, &times), 2.0 * (workers - 1.0) / workers);
        near(seconds_of(Way::Sharded, p, &times), 2.0 * (workers - 1.0) / workers);
        near(seconds_of(Way::ServersBeside, p, &times), 2.0 * (workers - 1.0) / workers);
    }
    // One server: p·S in while p·S goes out, one bucket of four hundred behind.
    near(seconds_of(Way::Servers(1), 6, &times), 6.0 * (1.0 + 1.0 / 400.0));
    near(seconds_of(Way::Servers(6), 6, &times), 1.0 + 1.0 / 400.0);
    // As many servers as workers have less to carry than a ring, on twice as many machines.
    assert_eq!(workers(6, 0.0).forecast(Way::Servers(6), &times).machines, 12);
}

#[test]
fn one_server_of_six_takes_three_point_six_times_as_long_as_a_ring_or_twice_that() {
    let ring = seconds_of(Way::AllReduce, 6, &step(1e-9, 400));
    let overlapped = seconds_of(Way::Servers(1), 6, &step(1e-9, 400));
    assert!((overlapped / ring - 3.6).abs() < 0.02, "{}", overlapped / ring);
    // In one message nothing can go out before all has come in. Pieces of it can, so it is one piece here.
    let mut one = step(1e-9, 1);
    one.buckets[0].elements = PIECE_ELEMENTS;
    let apart = seconds_of(Way::Servers(1), 6, &one) / seconds_of(Way::AllReduce, 6, &one);
    assert!((apart - 7.2).abs() < 0.01, "{apart}");
}

#[test]
fn messages_hide_behind_computing_and_computing_behind_messages() {
    // Ten seconds of computing hide a ring's 1.67, but for the last bucket, which the first node needs.
    let (long, p) = (step(10.0, 100), 6);
    let found = workers(p, 0.0).forecast(Way::AllReduce, &long);
    near(found.step_s, 10.0 + 10.0 / 6.0 / 100.0);
    near(found.waits_s, 10.0 / 6.0 / 100.0);
    // One server's six seconds hide half a second of computing: speed-up levels off.
    let found = seconds_of(Way::Servers(1), p, &step(0.5, 100));
    assert!((6.0..6.3).contains(&found), "{found}");
    // Kept until all are there, they hide nothing.
    let mut at_end = step(10.0, 100);
    at_end.buckets.iter_mut().for_each(|bucket| (bucket.ready_s, bucket.needed_s) = (10.0, 0.0));
    near(seconds_of(Way::AllReduce, p, &at_end), 10.0 + 10.0 / 6.0);
}

#[test]
fn bytes_are_those_of_the_literature() {
    let (times, p, bytes) = (step(1.0, 4), 4, 16_000_000);
    let of = |way| workers(p, 0.0).forecast(way, &times);
    let even = |bytes| Traffic { sent: bytes, received: bytes };
    for way in [Way::AllReduce, Way::Sharded, Way::ServersBeside] {
        assert_eq!(of(way).worker, even(bytes * 3 / 2), "{way:?}: 2(p−1)/p · S");
    }
    let one = of(Way::Servers(1));
    assert_eq!((one.worker, one.server), (even(bytes), Some(even(4 * bytes))), "S, and p · S in and out of the server");
    assert_eq!(of(Way::Servers(4)).server, Some(even(bytes)));
    assert_eq!((of(Way::AllReduce).algorithms, of(Way::ServersBeside).algorithms), (vec![Algorithm::Ring], vec![]));
}

#[test]
fn latency_counts_for_every_message() {
    let times =
        StepTimes { compute_s: 1e-9, buckets: vec![BucketTimes { ready_s: 1e-9, needed_s: 0.0, elements: 1000 }; 3] };
    let found = workers(2, 0.1).forecast(Way::AllReduce, &times).step_s;
    near(found, 3.0 * (2.0 * 0.1 + 1000.0 * 4.0 / 16e6));
    // Three buckets out and the last one back.
    let found = workers(2, 0.1).forecast(Way::Servers(1), &times).step_s;
    near(found, 4.0 * (0.1 + 2000.0 * 4.0 / 16e6));
}

proptest! {
    #[test]
    fn a_step_is_at_least_its_computing_and_its_messages_and_at_most_both(
        compute_s in 0.01f64..20.0, buckets in 1usize..30, p in 2usize..9,
    ) {
        let times = step(compute_s, buckets);
        for (way, messages_s) in [
            (Way::AllReduce, 2.0 * (p as f64 - 1.0) / p as f64),
            (Way::Servers(1), p as f64),
        ] {
            let found = seconds_of(way, p, &times);
            let both = if way == Way::AllReduce { messages_s } else { 2.0 * messages_s };
            prop_assert!(found >= compute_s.max(messages_s) * 0.999, "{way:?} {found} < {compute_s} or {messages_s}");
            prop_assert!(found <= (compute_s + both) * 1.001, "{way:?} {found} > {compute_s} + {both}");
        }
    }
}
