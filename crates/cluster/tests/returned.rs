//! A member that is lost and comes back into a run that goes on, over real sockets: what each is told, who is turned away, and how
//! a run ends without one that has come too late.

use std::net::SocketAddr;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_cluster::launch::local;
use paceline_cluster::spec::{Variables, from_environment};
use paceline_cluster::{Admission, ClusterError, Control, Folder, JoinOptions, Limits, Take, join};
use paceline_comm::{Rank, Token};
use paceline_system::signal;

const WORLD: usize = 3;

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited 20 s for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A run whose port stays open.
struct Open {
    port: u16,
    token: Token,
}

impl Open {
    fn enter(&self, rank: usize, config: &str) -> JoinHandle<Result<Control, ClusterError>> {
        let pairs = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", WORLD.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", self.port.to_string()),
        ];
        let variables: Variables = pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let member = from_environment(&variables).unwrap().unwrap();
        let limits = Limits { gather: Duration::from_secs(20), ..Limits::default() };
        let options = JoinOptions::new(member, self.token.clone(), config.into());
        let options = JoinOptions { limits, keeps_door: true, ..options };
        let data: SocketAddr = format!("127.0.0.1:{}", 7000 + rank).parse().unwrap();
        thread::spawn(move || join(options, |_| Ok(Some(data))))
    }

    /// What somebody is told who is not let in.
    fn refused(&self, rank: usize, config: &str) -> String {
        match self.enter(rank, config).join().unwrap() {
            Err(ClusterError::Refused(why)) => why,
            other => panic!("{other:?}"),
        }
    }
}

/// A run under way that can do without rank 1.
fn begin(return_is: Result<(), String>) -> (Open, Vec<Control>) {
    let open = Open { port: local::free_port().unwrap(), token: Token::random() };
    let entered: Vec<_> = (0..WORLD).rev().map(|rank| open.enter(rank, "seed = 1")).collect();
    let mut controls: Vec<Control> = entered.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
    controls.reverse();
    controls[0].spare(1..2, return_is);
    controls[0].send_folder(Folder { path: "/runs/a".into(), id: "a".into() });
    for control in &controls[1..] {
        control.folder(Duration::from_secs(5)).unwrap();
    }
    (open, controls)
}

fn lose_second(controls: &mut Vec<Control>) {
    drop(controls.remove(1));
    until("the loss", || controls.iter().all(|control| control.stop().has_lost(Rank(1))));
}

fn all_finish(controls: Vec<Control>) {
    let finish = |control: Control| thread::spawn(move || control.finish(Duration::from_secs(10)));
    let leaving: Vec<_> = controls.into_iter().map(finish).collect();
    leaving.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
}

#[test]
fn a_member_comes_back_is_told_what_all_know_and_takes_part_when_rank_0_says_so() {
    let (open, mut controls) = begin(Ok(()));
    assert!(open.refused(1, "seed = 1").contains("rank 1 is still in the run"));
    assert!(open.refused(2, "seed = 1").contains("rank 2 is still in the run"));
    let take = |finished| Take { stretch: 1, portions: 6, finished, claimed: false };
    assert_eq!(controls[1].take(take(0), Duration::from_secs(5)).unwrap().portion, Some(0));
    lose_second(&mut controls);
    assert!(open.refused(1, "seed = 2").contains("the configurations differ"));
    for life in [1, 2] {
        let back = open.enter(1, "seed = 1").join().unwrap().unwrap();
        assert_eq!((back.life(), back.table().world(), controls[0].returning()), (life, WORLD, None));
        assert_eq!(back.folder(Duration::from_secs(5)).unwrap().id, "a");
        until("the others to know", || controls[1].stop().returning(Rank(1)) == Some(life));
        assert!(open.refused(1, "seed = 1").contains("rank 1 is still in the run"), "an impostor");
        back.ready();
        until("rank 0 to know", || controls[0].returning() == Some((Rank(1), life)));
        let admission = Admission { stretch: 1, step: 40, steps: 30, place: "here".into() };
        // One of another life does not take part, whoever says so, and this one waits as before.
        controls[0].admit((Rank(1), life + 1), admission.clone());
        assert_eq!(controls[0].returning(), Some((Rank(1), life)));
        controls[0].admit((Rank(1), life), admission.clone());
        assert_eq!(back.admission(&signal::Stop::new()).unwrap(), admission);
        assert!(!controls[0].stop().has_lost(Rank(1)));
        let given = back.take(take(0), Duration::from_secs(5)).unwrap();
        assert_eq!(given.portion, Some(u64::from(life)), "the next that nobody has");
        controls.insert(1, back);
        if life == 1 {
            lose_second(&mut controls);
        }
    }
    all_finish(controls);
}

#[test]
fn a_run_ends_without_one_that_has_come_back_and_not_taken_part() {
    let (open, mut controls) = begin(Ok(()));
    lose_second(&mut controls);
    let back = open.enter(1, "seed = 1").join().unwrap().unwrap();
    back.ready();
    until("rank 0 to know", || controls[0].returning().is_some());
    all_finish(controls);
    let ended = back.admission(&signal::Stop::new()).unwrap_err();
    assert!(ended.to_string().contains("the run ended before rank 1 could take part again"), "{ended}");
}

#[test]
fn a_member_that_may_not_come_back_hears_why_and_the_run_goes_on() {
    let (open, mut controls) = begin(Err("type --carry tcp".into()));
    lose_second(&mut controls);
    assert_eq!(open.refused(1, "seed = 1"), "type --carry tcp");
    all_finish(controls);
}
