//! Faults on real processes: killed, stopped, cut off, flooded, started wrongly; a hundred in all, several at a time.
//! Each asserts that its fault fired, that every survivor named who was at fault within 5 s and ended with exit code 1,
//! and that no process is left.

mod member;
mod processes;
mod proxy;
mod scenarios;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use paceline_system::host;

use processes::with_mark;

/// Scenarios at the same time: they mostly wait.
const LANES: usize = 8;

/// A fault, how often it is struck, and how: the number of the repetition and the mark of its processes.
type Scenario = (&'static str, usize, fn(usize, &str));

const SCENARIOS: [Scenario; 13] = [
    ("stopped", 10, scenarios::stopped),
    ("link that swallows", 4, scenarios::swallowed),
    ("full socket buffer", 4, scenarios::full_socket_buffer),
    ("killed", 20, scenarios::killed),
    ("link cut", 10, scenarios::cut),
    ("wrong token", 10, scenarios::wrong_token),
    ("other version", 10, scenarios::other_version),
    ("port taken", 10, scenarios::port_taken),
    ("never arrives", 8, scenarios::never_arrives),
    ("garbage to the port", 8, scenarios::garbage),
    ("launcher killed", 2, scenarios::launcher_killed),
    ("launcher interrupted", 2, scenarios::launcher_interrupted),
    ("launched process killed", 2, scenarios::launched_killed),
];

fn main() -> ExitCode {
    let variables = host::variables();
    match variables.get("FAULT_ROLE").map(String::as_str) {
        Some("member") => return member::member(&variables),
        Some("launcher") => return member::launcher(&variables),
        _ => {}
    }
    // `cargo test NAME` filters by name: run only what it names, and nothing for a name from elsewhere.
    let filters: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let strikes: Vec<Scenario> = SCENARIOS
        .iter()
        .filter(|(name, ..)| wanted(name))
        .flat_map(|(name, times, strike)| (0..*times).map(move |repetition| (*name, repetition, *strike)))
        .collect();
    let (next, began) = (AtomicUsize::new(0), Instant::now());
    let outcomes: Mutex<BTreeMap<&str, (usize, usize, Duration)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                while let Some((name, repetition, strike)) = strikes.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let mark = format!("{}-{name}-{repetition}", std::process::id()).replace(' ', "-");
                    let started = Instant::now();
                    let outcome = catch_unwind(AssertUnwindSafe(|| strike(*repetition, &mark)));
                    let left = with_mark(&mark);
                    if !left.is_empty() {
                        eprintln!("{name}: processes {left:?} are left");
                    }
                    let good = outcome.is_ok() && left.is_empty();
                    let mut outcomes = outcomes.lock().unwrap();
                    let entry = outcomes.entry(name).or_default();
                    *entry = (entry.0 + usize::from(good), entry.1 + 1, entry.2.max(started.elapsed()));
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap();
    for (name, (good, all, longest)) in &outcomes {
        println!("{name}: {good} of {all} as they should be, the longest took {:.1} s", longest.as_secs_f64());
    }
    let (good, all) = outcomes.values().fold((0, 0), |sum, (good, all, _)| (sum.0 + good, sum.1 + all));
    println!("faults: {good} of {all} in {:.1} s", began.elapsed().as_secs_f64());
    if good == strikes.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
