//! Ranks that are lost and come back: what the hub decides, whatever comes in which order.

use proptest::prelude::*;

use super::*;

const WORLD: usize = 4;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A hub of a run under way that can do without ranks 1 and 2.
fn hub() -> Membership {
    let mut hub = Membership::hub(WORLD, "a", Limits::default(), ms(0));
    for rank in 1..WORLD {
        hub.on(Event::Arrived { rank: Rank::at(rank), host: "b".into() }, ms(0));
    }
    hub.spare(1..3);
    hub
}

fn lost(rank: usize) -> Event {
    Event::Lost { rank: Rank::at(rank), why: "closed".into() }
}

fn returned(rank: usize) -> Event {
    Event::Returned { rank: Rank::at(rank), host: "c".into() }
}

fn readmitted(rank: usize) -> Event {
    Event::Readmitted { rank: Rank::at(rank) }
}

#[test]
fn a_lost_rank_comes_back_gets_ready_and_takes_part_and_may_be_lost_again() {
    let mut hub = hub();
    assert!(hub.may_return(Rank(2)).unwrap_err().contains("rank 2 is still in the run"));
    assert_eq!(hub.on(returned(2), ms(10)), Decision::default(), "who is there does not come back");
    hub.on(lost(2), ms(20));
    let back = hub.on(returned(2), ms(30));
    assert_eq!(back.actions, [Action::LetReturn(Rank(2), 1)]);
    assert_eq!(back.reason, "rank 2 has come back, from c, and gets ready");
    assert!(!hub.is_present(Rank(2)), "nobody waits for it yet");
    assert!(hub.may_return(Rank(2)).unwrap_err().contains("is still in the run"), "an impostor");
    let again = hub.on(readmitted(2), ms(40));
    assert_eq!((again.actions, hub.is_present(Rank(2))), (vec![Action::Readmit(Rank(2))], true));
    assert_eq!(hub.on(readmitted(2), ms(45)), Decision::default(), "once");
    assert!(matches!(hub.on(lost(2), ms(50)).actions[..], [Action::GoOn(_)]));
    assert_eq!(hub.on(returned(2), ms(60)).actions, [Action::LetReturn(Rank(2), 2)]);
}

#[test]
fn one_that_gets_ready_is_watched_and_nobody_waits_for_it_at_the_end() {
    let mut hub = hub();
    hub.on(lost(1), ms(0));
    hub.on(returned(1), ms(0));
    // It says nothing, and the others do.
    let mut lost_again = None;
    for now in (0..17_000).step_by(100) {
        for rank in [0, 2, 3] {
            let beat = Event::Beat { rank: Rank(rank), position: Position::default(), waiting: Waiting::default() };
            assert_eq!(hub.on(beat, ms(now)).actions, []);
        }
        if let [Action::GoOn(verdict)] = &hub.on(Event::Tick, ms(now)).actions[..] {
            lost_again.get_or_insert((verdict.rank, verdict.host.clone()));
        }
    }
    assert_eq!(lost_again, Some((1, "c".into())));
    hub.on(returned(1), ms(17_000));
    for rank in [2, 3] {
        hub.on(Event::Goodbye { rank: Rank(rank) }, ms(17_010));
    }
    assert_eq!(hub.on(Event::Goodbye { rank: Rank(0) }, ms(17_020)).actions, [Action::Finish]);
}

#[test]
fn a_rank_that_is_through_or_that_the_others_cannot_do_without_does_not_come_back() {
    let mut hub = hub();
    hub.on(Event::Goodbye { rank: Rank(1) }, ms(0));
    assert!(hub.may_return(Rank(1)).unwrap_err().contains("through"));
    assert!(hub.may_return(Rank(3)).is_err());
    hub.on(lost(3), ms(10));
    assert!(hub.ended() && hub.on(returned(3), ms(20)) == Decision::default());
}

/// What a model of one rank has become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    There,
    Lost,
    Back,
}

proptest! {
    #[test]
    fn whatever_comes_in_which_order_every_rank_is_there_lost_or_back(
        events in prop::collection::vec((1usize..3, 0u8..5), 0..200),
    ) {
        let mut hub = hub();
        let (mut ranks, mut lives) = ([Is::There; 3], [0u16; 3]);
        for (index, (rank, what)) in events.into_iter().enumerate() {
            let now = ms(index as u64);
            let event = match what {
                0 => lost(rank),
                1 => returned(rank),
                2 => readmitted(rank),
                3 => Event::Failed { rank: Rank::at(rank), why: "x".into(), suspect: None, in_vain: false },
                _ => Event::Beat { rank: Rank::at(rank), position: Position::default(), waiting: Waiting::default() },
            };
            let may = hub.may_return(Rank::at(rank)).is_ok();
            prop_assert_eq!(may, ranks[rank] == Is::Lost, "only a lost rank may come back");
            let decision = hub.on(event, now);
            let (is, acts) = match (ranks[rank], what) {
                (Is::There | Is::Back, 0 | 3) => (Is::Lost, matches!(decision.actions[..], [Action::GoOn(_)])),
                (Is::Lost, 1) => {
                    lives[rank] += 1;
                    (Is::Back, decision.actions == [Action::LetReturn(Rank::at(rank), lives[rank])])
                }
                (Is::Back, 2) => (Is::There, decision.actions == [Action::Readmit(Rank::at(rank))]),
                (is, _) => (is, decision.actions.is_empty()),
            };
            prop_assert!(acts, "{:?} and {what}: {decision:?}", ranks[rank]);
            prop_assert!(decision.actions.is_empty() || !decision.reason.is_empty(), "each action has its reason");
            ranks[rank] = is;
            prop_assert!(!hub.ended());
            prop_assert_eq!(hub.is_present(Rank::at(rank)), is == Is::There);
        }
        // Whoever is lost or gets ready is not waited for.
        for rank in (1..WORLD).filter(|rank| ranks.get(*rank).is_none_or(|is| *is == Is::There)) {
            hub.on(Event::Goodbye { rank: Rank::at(rank) }, ms(1000));
        }
        prop_assert_eq!(hub.on(Event::Goodbye { rank: Rank(0) }, ms(1000)).actions, [Action::Finish]);
    }
}
