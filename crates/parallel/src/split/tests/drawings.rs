//! Drawings, those of the documentation among them.

use super::*;

fn check(schedule: &Schedule, times: &[StageTimes], width: usize, expected: &[&str]) {
    let text = draw(schedule, times, &[], width);
    assert_eq!(text.lines().collect::<Vec<_>>(), expected, "\n{text}");
}

#[test]
fn without_times_all_passes_take_the_same() {
    let schedule = Schedule::new(Kind::OneForwardOneBackward, 3, &stages([3.0; 2]));
    let rows = ["stage 0 |F0 F1 ..... B0--- F2 B1--- .. B2---|", "stage 1 |.. F0 B0--- F1 B1--- F2 B2--- .....|"];
    check(&schedule, &[], 80, &rows);
}

#[test]
fn times_are_to_scale_and_a_name_is_never_cut() {
    // Nobody wants the gradient of an image: B takes no time in the first stage.
    let first = StageTimes { forward_s: 2.0, inputs_s: 0.0, weights_s: 2.0 };
    let times = [first, StageTimes { forward_s: 1.0, inputs_s: 1.0, weights_s: 1.0 }];
    let schedule = Schedule::new(Kind::ZeroBubble, 2, &times);
    let rows = ["stage 0 |F0--- F1--- B0 W0--- B1 W1---|", "stage 1 |..... F0 B0 F1 B1 W0 W1 .....|"];
    check(&schedule, &times, 80, &rows);
}

#[test]
fn names_give_way_to_letters_where_they_do_not_fit() {
    let schedule = Schedule::new(Kind::OneForwardOneBackward, 3, &stages([3.0; 2]));
    check(&schedule, &[], 22, &["stage 0 |FF..BBFBB.BB|", "stage 1 |.FBBFBBFBB..|"]);
    check(&schedule, &[], 5, &["stage", "stage"]);
}

#[test]
fn the_drawings_of_the_documentation_are_these() {
    let page = include_str!("../../../../../docs/split.md");
    for (count, micro_batches) in [(2, 4), (4, 8)] {
        let times = vec![StageTimes { forward_s: 1.0, inputs_s: 1.0, weights_s: 1.0 }; count];
        for kind in Kind::ALL {
            let text = draw(&Schedule::new(kind, micro_batches, &times), &[], &[], 110);
            assert!(page.contains(&text), "docs/split.md lacks {kind}:\n{text}");
        }
    }
}
