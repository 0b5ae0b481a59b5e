//! What the writer leaves behind after a crash or on a full disk, the reader reads: both ends of the log together.

use std::path::Path;

use paceline_lab::log;
use paceline_system::clock::Clock;
use paceline_system::disk::Disk;
use paceline_system::event::{Event, EventLog, Line, SCHEMA_VERSION};
use paceline_system::host::Host;

fn started(resumed_step: u64) -> Event {
    Event::RunStarted {
        schema: SCHEMA_VERSION,
        version: "1".into(),
        unix_s: 0,
        model: "m".into(),
        data: "d".into(),
        parameters: 1,
        resumed_step,
        steps_total: 9,
        host: Host::default(),
        config: String::new(),
    }
}

fn warning() -> Event {
    Event::Warning { message: "a hot machine".into() }
}

fn open(disk: &Disk, run: &Path) -> EventLog {
    EventLog::open(disk, Clock::manual(), run, 0).unwrap()
}

fn events(run: &Path) -> Vec<Event> {
    let lines = log::read(&Disk::real(), &run.join("events/rank-0.jsonl")).unwrap();
    lines.into_iter().map(|Line { event, .. }| event).collect()
}

#[test]
fn a_run_that_was_cut_at_any_byte_and_resumed_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = open(&Disk::real(), folder.path());
    first.write(started(0)).unwrap();
    first.write(warning()).unwrap();
    let whole = Disk::real().read(&folder.path().join("events/rank-0.jsonl")).unwrap();
    let first_end = whole.iter().position(|&byte| byte == b'\n').unwrap();
    for length in first_end + 1..=whole.len() {
        let folder = tempfile::tempdir().unwrap();
        Disk::real().create_dir(&folder.path().join("events")).unwrap();
        Disk::real().write(&folder.path().join("events/rank-0.jsonl"), &whole[..length]).unwrap();
        let mut resumed = open(&Disk::real(), folder.path());
        resumed.write(started(1)).unwrap();
        resumed.write(warning()).unwrap();
        let mut expected = vec![started(0), started(1), warning()];
        // A line that lost no more than its newline is whole.
        if length + 1 >= whole.len() {
            expected.insert(1, warning());
        }
        assert_eq!(events(folder.path()), expected, "{length} of {} bytes", whole.len());
    }
}

#[test]
fn a_full_disk_leaves_whole_lines_at_every_size() {
    let folder = tempfile::tempdir().unwrap();
    open(&Disk::real(), folder.path()).write(started(0)).unwrap();
    let mut expected = vec![started(0)];
    for bytes in 0..200 {
        let disk = Disk::full_after(bytes);
        let mut log = open(&disk, folder.path());
        while log.write(warning()).is_ok() {
            expected.push(warning());
        }
        assert!(disk.was_full());
        // Somebody made room for the last words.
        let finish =
            Event::RunFinished { step: 1, reason: "failed".into(), error: None, seconds: 1.0, peak_memory_bytes: 1 };
        open(&Disk::real(), folder.path()).write(finish.clone()).unwrap();
        expected.push(finish);
    }
    assert_eq!(events(folder.path()), expected);
}
