//! Schedules against lists written by hand, the literature's numbers, the best of all schedules, and what
//! must hold for any.

mod any;
mod drawings;

use super::*;

fn list(text: &str) -> Vec<Task> {
    let pass = |letter: &str| match letter {
        "F" => Pass::Forward,
        "B" => Pass::Backward,
        _ => Pass::Weights,
    };
    let task = |word: &str| Task { pass: pass(&word[..1]), micro_batch: word[1..].parse().unwrap() };
    text.split_whitespace().map(task).collect()
}

/// Stages that take so much of one device's time; passes are alike.
fn stages<const N: usize>(shares: [f64; N]) -> Vec<StageTimes> {
    shares.map(|share| StageTimes { forward_s: share / 3.0, inputs_s: share / 3.0, weights_s: share / 3.0 }).to_vec()
}

fn seconds(kind: Kind, micro_batches: usize, times: &[StageTimes]) -> f64 {
    Schedule::new(kind, micro_batches, times).forecast(times, &vec![0.0; times.len() - 1]).seconds
}

#[test]
fn two_stages_and_three_micro_batches_as_written_by_hand() {
    let times = stages([3.0, 3.0]);
    for (kind, lists) in [
        (Kind::GPipe, ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]),
        (Kind::OneForwardOneBackward, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        (Kind::ZeroBubble, ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
    ] {
        let schedule = Schedule::new(kind, 3, &times);
        assert_eq!([schedule.tasks(0), schedule.tasks(1)], lists.map(list), "{kind}");
    }
}

#[test]
fn four_stages_and_eight_micro_batches_as_in_the_literature() {
    // Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, figure 4, top.
    let schedule = Schedule::new(Kind::OneForwardOneBackward, 8, &stages([3.0; 4]));
    for (stage, tasks) in [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(schedule.tasks(stage), list(tasks), "stage {stage}");
        assert_eq!(schedule.slots(stage), 4 - stage);
    }
    assert_eq!([0, 1, 2, 3, 4, 5].map(|micro_batch| schedule.slot(1, micro_batch)), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn equal_stages_wait_as_long_as_published() {
    for (count, micro_batches) in [(2, 2), (2, 8), (3, 3), (4, 4), (4, 8), (8, 8), (8, 32), (16, 64)] {
        let times = vec![StageTimes { forward_s: 1.0, inputs_s: 1.0, weights_s: 1.0 }; count];
        let bubble = |kind| {
            let schedule = Schedule::new(kind, micro_batches, &times);
            schedule.forecast(&times, &vec![0.0; count - 1]).bubble()
        };
        let (s, m) = (count as f64, micro_batches as f64);
        for kind in [Kind::GPipe, Kind::OneForwardOneBackward] {
            assert!((bubble(kind) - (s - 1.0) / (m + s - 1.0)).abs() < 1e-12, "{kind} of {count}×{micro_batches}");
        }
        // (s − 1)/3m of the step's work.
        let waiting = (s - 1.0) / (3.0 * m);
        assert!((bubble(Kind::ZeroBubble) - waiting / (1.0 + waiting)).abs() < 1e-12, "of {count}×{micro_batches}");
    }
}

#[test]
fn two_unequal_stages_take_what_the_larger_takes_and_a_part_of_the_smaller() {
    for (a, m) in [(0.5, 2), (0.5, 8), (0.57, 4), (0.66, 8), (0.78, 16)] {
        let b = 1.0 - a;
        let micro_batches = m as f64;
        let [smaller_first, larger_first] =
            [[b, a], [a, b]].map(|shares| stages(shares.map(|share| share / micro_batches)));
        let pairs = a + b / micro_batches;
        assert!((seconds(Kind::OneForwardOneBackward, m, &smaller_first) - pairs).abs() < 1e-12);
        assert!(seconds(Kind::OneForwardOneBackward, m, &larger_first) < pairs + 1e-12);
        let separated = a + b / (3.0 * micro_batches);
        assert!((seconds(Kind::ZeroBubble, m, &smaller_first) - separated).abs() < 1e-12, "{a} of {m}");
        assert!(seconds(Kind::ZeroBubble, m, &larger_first) < separated + 1e-12, "{a} of {m}");
    }
}

#[test]
fn a_schedule_without_bubbles_keeps_no_more_than_it_needs() {
    // The last stage waits for the first anyway, so it gains nothing from gradients that it puts off.
    let schedule = Schedule::new(Kind::ZeroBubble, 8, &stages([9.0, 1.0]));
    assert_eq!([schedule.slots(0), schedule.slots(1)], [2, 1]);
}

#[test]
fn messages_wait_for_the_link_and_not_for_each_other_direction() {
    let times = vec![StageTimes { forward_s: 1.0, inputs_s: 0.5, weights_s: 0.5 }; 2];
    let forecast = Schedule::new(Kind::OneForwardOneBackward, 2, &times).forecast(&times, &[3.0]);
    let begins = |stage: usize| forecast.spans[stage].iter().map(|span| span.begin_s).collect::<Vec<_>>();
    // F0 ends at 1 and arrives at 4, F1 ends at 2, waits until 4 and arrives at 7; B0 ends at 6 and arrives
    // at 9.
    assert_eq!(begins(1), [4.0, 5.0, 7.0, 8.0]);
    assert_eq!(begins(0), [0.0, 1.0, 9.0, 12.0]);
    assert_eq!((forecast.seconds, forecast.busy_s.as_slice()), (13.0, [4.0, 4.0].as_slice()));
    assert_eq!((forecast.speedup(), forecast.bound()), (8.0 / 13.0, 2.0));
}

#[test]
fn stages_that_take_no_time_have_a_schedule() {
    for kind in Kind::ALL {
        let times = vec![StageTimes::default(); 3];
        let forecast = Schedule::new(kind, 4, &times).forecast(&times, &[0.0; 2]);
        assert_eq!((forecast.seconds, forecast.bubble(), forecast.speedup(), forecast.bound()), (0.0, 0.0, 1.0, 1.0));
    }
}

#[test]
fn a_damaged_schedule_is_found_out() {
    let complaint = |kind: Kind, lists: &[&str]| {
        Schedule::from_tasks(kind, 2, lists.iter().map(|text| list(text)).collect()).verify().unwrap_err()
    };
    let pairs = Kind::OneForwardOneBackward;
    for (kind, lists, expected) in [
        (pairs, ["F0 F1 B1 B0", "F0 B0 F1 B1"], "stage 0 has B1 where B0 is due"),
        (pairs, ["F0 F1 B0 B1", "F0 B0 B1 F1"], "stage 1 has B1 before what it needs"),
        (pairs, ["F0 F1 B0", "F0 B0 F1 B1"], "stage 0 has 2 F, 1 B and 0 W of 2 micro-batches"),
        (pairs, ["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1"], "stage 0 has W0, but gradients are not separated"),
        (pairs, ["F0 F1 B0 B1", "F0 F1 B0 B1"], "stage 1 keeps 2 micro-batches at once, and 1f1b allows 1"),
        (Kind::GPipe, ["F0 B0 F1 B1", "F0 F1 B0 B1"], "stage 0 waits for ever before B0"),
        (Kind::ZeroBubble, ["F0 F1 B0 B1 W0 W1", "F0 W0 B0 F1 B1 W1"], "stage 1 has W0 before what it needs"),
    ] {
        assert_eq!(complaint(kind, &lists), expected);
    }
}
