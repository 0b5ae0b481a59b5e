//! Writes made-up runs and their reports, for looking at the page: `cargo run -p paceline-lab --example specimen DIR`.

use std::path::Path;

use paceline_lab::{TensorBoard, report};
use paceline_system::disk::Disk;
use paceline_system::event::{Event, Line};

mod log;

fn write(folder: &Path, lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let disk = Disk::real();
    disk.create_dir(&folder.join("events"))?;
    let text: Result<Vec<String>, _> = lines.iter().map(serde_json::to_string).collect();
    disk.write(&folder.join("events/rank-0.jsonl"), (text?.join("\n") + "\n").as_bytes())?;
    let mut board = TensorBoard::create(&disk, &folder.join("tensorboard"), 1_790_000_000, "tourmalet")?;
    for line in lines {
        board.record(line)?;
    }
    board.flush()?;
    println!("{}", report::write(&disk, folder)?.display());
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("name a folder: cargo run -p paceline-lab --example specimen DIR")?;
    let folder = Path::new(&folder);
    let failure = Event::RunFinished {
        step: 700,
        reason: "failed".into(),
        error: Some(
            "the loss is not a number at step 700, layer stage2.block1.conv2; the last good checkpoint is \
             checkpoints/step-00000390"
                .into(),
        ),
        seconds: 97.0,
        peak_memory_bytes: 1 << 30,
    };
    write(&folder.join("done"), &log::lines(10, None, Some(log::done(3900))))?;
    write(&folder.join("resumed"), &log::lines(10, Some(1770), Some(log::done(3900))))?;
    let mut failed = log::lines(10, None, None);
    failed.truncate(703);
    failed.push(Line { time_s: 97.0, rank: 0, event: failure });
    write(&folder.join("failed"), &failed)?;
    write(&folder.join("short"), &log::lines(10, None, None)[..12])?;
    write(&folder.join("long"), &log::lines(300, None, Some(log::done(117_000))))
}
