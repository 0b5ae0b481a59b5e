//! TensorBoard event files: the run's events once more, in the format that TensorBoard opens.
//!
//! A file is a sequence of TFRecords, each a protobuf [`proto::Event`] between checksums:
//!
//! ```text
//! length: u64 LE | masked CRC32C of length: u32 LE | data | masked CRC32C of data: u32 LE
//! ```
//!
//! The mask (rotate right by 15, add a constant) keeps checksums of data that holds checksums from being degenerate.
//! TensorBoard is one more reader of events: [`TensorBoard::record`] takes the same lines as the report. It is called by
//! whoever writes the event log, and it never calls back.

use std::path::{Path, PathBuf};

use paceline_system::disk::{Append, Disk, DiskError};
use paceline_system::event::{Event, Line};
use paceline_system::printable::printable;
use prost::Message;

pub mod proto;

use proto::{Content, What};

/// Records wait in memory up to this size, so that a step costs a copy and not a system call.
const BUFFER_BYTES_MAX: usize = 64 << 10;

/// Records wait no longer than this, so that a live run can be watched.
const BUFFER_SECONDS_MAX: f64 = 5.0;

/// Files of one host within one second that are told apart.
const SUFFIXES_MAX: u32 = 1000;

/// A TensorBoard event file that grows.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    target: Append,
    buffer: Vec<u8>,
    unix_s: u64,
    flushed_s: f64,
}

impl TensorBoard {
    /// Starts a new event file in `folder`, which is created if needed. `unix_s` is the wall-clock time at which the
    /// event log's seconds began, `host` the machine's name.
    ///
    /// # Errors
    /// When the folder or the file cannot be written.
    pub fn create(disk: &Disk, folder: &Path, unix_s: u64, host: &str) -> Result<Self, DiskError> {
        disk.create_dir(folder)?;
        let host: String = host.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        let name = |suffix: u32| folder.join(format!("events.out.tfevents.{unix_s}.{host}.{suffix}"));
        let path = (0..SUFFIXES_MAX).map(name).find(|path| !disk.exists(path)).unwrap_or_else(|| name(SUFFIXES_MAX));
        let target = disk.append(&path)?;
        let mut board = Self { path, target, buffer: Vec::new(), unix_s, flushed_s: 0.0 };
        board.push(0.0, 0, What::FileVersion("brain.Event:2".into()));
        board.flush()?;
        Ok(board)
    }

    /// The file being written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds what the line says, where TensorBoard has a place for it. Events rarer than steps go to the disk at once.
    ///
    /// # Errors
    /// When the disk is full or refuses; the records that were waiting are dropped.
    pub fn record(&mut self, line: &Line) -> Result<(), DiskError> {
        match &line.event {
            Event::RunStarted { resumed_step, config, .. } => {
                if *resumed_step > 0 {
                    let session = proto::SessionLog { status: proto::SESSION_START };
                    self.push(line.time_s, resumed_step + 1, What::SessionLog(session));
                }
                let summary = proto::Summary { value: vec![text("config", config)] };
                self.push(line.time_s, *resumed_step, What::Summary(summary));
            }
            Event::Step { step, loss, accuracy, learning_rate, samples, seconds, phases, .. } => {
                let mut value = vec![
                    scalar("loss/train", *loss),
                    scalar("accuracy/train", *accuracy),
                    scalar("learning_rate", *learning_rate),
                ];
                if *seconds > 0.0 {
                    value.push(scalar("throughput/samples_per_s", *samples as f64 / seconds));
                }
                value.extend(phases.iter().map(|(phase, phase_s)| scalar(&format!("time/{phase}"), phase_s)));
                self.push(line.time_s, *step, What::Summary(proto::Summary { value }));
            }
            Event::Epoch { step, val_loss, val_top1, val_top5, .. } => {
                let values = [("loss/val", val_loss), ("accuracy/val_top1", val_top1), ("accuracy/val_top5", val_top5)];
                let value: Vec<_> =
                    values.into_iter().filter_map(|(tag, number)| number.map(|number| scalar(tag, number))).collect();
                if !value.is_empty() {
                    self.push(line.time_s, *step, What::Summary(proto::Summary { value }));
                }
            }
            Event::Evaluated { step, val_loss, val_top1, val_top5, .. } => {
                let values = [("loss/val", val_loss), ("accuracy/val_top1", val_top1), ("accuracy/val_top5", val_top5)];
                let value = values.map(|(tag, number)| scalar(tag, *number)).to_vec();
                self.push(line.time_s, *step, What::Summary(proto::Summary { value }));
            }
            Event::Restarted { .. }
            | Event::Pipeline { .. }
            | Event::Parts { .. }
            | Event::Checkpoint { .. }
            | Event::Gpu(_)
            | Event::Served { .. }
            | Event::Late { .. }
            | Event::CaughtUp { .. }
            | Event::Balanced { .. }
            | Event::Lost { .. }
            | Event::Returned { .. }
            | Event::Warning { .. }
            | Event::RunFinished { .. } => {}
        }
        let is_step = matches!(line.event, Event::Step { .. });
        let is_due = self.buffer.len() >= BUFFER_BYTES_MAX || line.time_s - self.flushed_s >= BUFFER_SECONDS_MAX;
        if is_due || !is_step {
            self.flushed_s = line.time_s;
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the records that wait in memory.
    ///
    /// # Errors
    /// When the disk is full or refuses; the records are dropped.
    pub fn flush(&mut self) -> Result<(), DiskError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let written = self.target.write(&self.buffer);
        self.buffer.clear();
        written
    }

    fn push(&mut self, time_s: f64, step: u64, what: What) {
        let event = proto::Event { wall_time: self.unix_s as f64 + time_s, step: step as i64, what: Some(what) };
        frame(&event.encode_to_vec(), &mut self.buffer);
    }
}

/// Appends `data` to `target` as one TFRecord.
fn frame(data: &[u8], target: &mut Vec<u8>) {
    let length = (data.len() as u64).to_le_bytes();
    target.extend_from_slice(&length);
    target.extend_from_slice(&masked_crc(&length).to_le_bytes());
    target.extend_from_slice(data);
    target.extend_from_slice(&masked_crc(data).to_le_bytes());
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

fn scalar(tag: &str, value: f64) -> proto::Value {
    proto::Value { tag: printable(tag), content: Some(Content::SimpleValue(value as f32)), metadata: None }
}

/// Text for TensorBoard's text plugin, which renders Markdown: four spaces make it a code block.
fn text(tag: &str, body: &str) -> proto::Value {
    let block: Vec<String> = body.lines().map(|line| format!("    {}", printable(line))).collect();
    let tensor = proto::Tensor {
        dtype: proto::DT_STRING,
        tensor_shape: Some(proto::Shape { dim: vec![proto::Dim { size: 1 }] }),
        string_val: vec![block.join("\n").into_bytes()],
    };
    let plugin_data = Some(proto::PluginData { plugin_name: "text".to_owned() });
    proto::Value {
        tag: tag.to_owned(),
        content: Some(Content::Tensor(tensor)),
        metadata: Some(proto::Metadata { plugin_data }),
    }
}
