//! Reads event files back, line by line, so that a run of a million steps is never held as a million parsed lines.
//!
//! More forgiving than a plain parser in the ways a crash or a full disk asks for. Left out are: a cut last line, a cut
//! line before the `run_started` of the process that resumed the run, and a cut line onto which a `run_started` or a
//! `run_finished` was written. Any other damage is an error that names the file and the line.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use paceline_system::disk::{Disk, DiskError};
use paceline_system::event::{Event, Line, SCHEMA_VERSION};
use serde::de::value::MapDeserializer;
use serde::de::{Deserialize, Deserializer, IntoDeserializer, Visitor};
use serde_json::Value;

use crate::error::LabError;

/// How every line begins, as the writer writes it. Inside a JSON string the quotes would be escaped, so this text in the
/// middle of a line can only be the start of another line.
const LINE_START: &str = "{\"time_s\":";

/// The longest line that is read: a file without line breaks is no event file. The longest one written, the start of a
/// run, holds the configuration.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// The event files of a run, sorted by name.
///
/// # Errors
/// When the folder cannot be listed, or holds no event file.
pub fn files(disk: &Disk, run: &Path) -> Result<Vec<PathBuf>, LabError> {
    let folder = run.join("events");
    if !disk.is_dir(&folder) {
        return Err(LabError::NoEvents { run: run.to_owned() });
    }
    let mut files = disk.list(&folder)?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    if files.is_empty() { Err(LabError::NoEvents { run: run.to_owned() }) } else { Ok(files) }
}

/// All lines of one event file.
///
/// # Errors
/// As [`for_each`].
pub fn read(disk: &Disk, path: &Path) -> Result<Vec<Line>, LabError> {
    let mut lines = Vec::new();
    for_each(disk, path, |line| lines.push(line))?;
    Ok(lines)
}

/// Calls `visit` with each line of one event file, in order.
///
/// # Errors
/// When the file cannot be read, a line that no crash explains is not an event, or the schema is newer than this program.
pub fn for_each(disk: &Disk, path: &Path, mut visit: impl FnMut(Line)) -> Result<(), LabError> {
    let unreadable = |source| DiskError { verb: "read", path: path.to_owned(), source };
    let mut source = BufReader::new(disk.open(path)?);
    // A crash can cut inside a character, so text is made line by line.
    let mut bytes = Vec::new();
    // A line that is not an event, and may be left out if the file ends or a resumed process starts behind it.
    let mut cut: Option<LabError> = None;
    for number in 1.. {
        bytes.clear();
        if source.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).map_err(unreadable)? == 0 {
            break;
        }
        if bytes.len() as u64 == LINE_BYTES_MAX {
            let problem = format!("it has more than {LINE_BYTES_MAX} bytes");
            return Err(LabError::Line { path: path.to_owned(), line: number, problem });
        }
        let text = String::from_utf8_lossy(&bytes);
        match parse(text.trim_end()) {
            Ok(lines) => {
                let resumed = matches!(lines.first(), Some(Line { event: Event::RunStarted { .. }, .. }));
                if let Some(error) = cut.take().filter(|_| !resumed) {
                    return Err(error);
                }
                for line in lines {
                    check_schema(&line, path, number)?;
                    visit(line);
                }
            }
            // A process that resumes may be cut in its very first line too.
            Err(_) if cut.is_some() && text.starts_with(LINE_START) => {}
            Err(error) => {
                let error = LabError::Line { path: path.to_owned(), line: number, problem: error.to_string() };
                if let Some(earlier) = cut.replace(error) {
                    return Err(earlier);
                }
            }
        }
    }
    Ok(())
}

fn check_schema(line: &Line, path: &Path, number: usize) -> Result<(), LabError> {
    match line.event {
        Event::RunStarted { schema, .. } if schema > SCHEMA_VERSION => {
            Err(LabError::Schema { path: path.to_owned(), line: number, found: schema, known: SCHEMA_VERSION })
        }
        _ => Ok(()),
    }
}

/// The events in one line of text: one, or, where a crash or a full disk cut the newline away, those that were written
/// onto each other.
fn parse(text: &str) -> Result<Vec<Line>, serde_json::Error> {
    let error = match parse_one(text) {
        Ok(line) => return Ok(vec![line]),
        Err(_) if is_of_a_later_kind(text) => return Ok(Vec::new()),
        Err(error) => error,
    };
    let glued = text.match_indices(LINE_START).map(|(start, _)| start).filter(|&start| start > 0);
    let starts: Vec<usize> = std::iter::once(0).chain(glued).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    let parts: Vec<_> = starts.iter().zip(ends).map(|(&start, end)| parse_one(&text[start..end])).collect();
    match parts.last() {
        Some(Ok(Line { event: Event::RunStarted { .. } | Event::RunFinished { .. }, .. })) => {
            Ok(parts.into_iter().flatten().collect())
        }
        _ => Err(error),
    }
}

/// Whether a line is whole and tells an event whose name this program does not know.
fn is_of_a_later_kind(text: &str) -> bool {
    let Ok(Value::Object(fields)) = serde_json::from_str(text) else { return false };
    let Some(name) = fields.get("event").filter(|name| name.is_string() && fields.contains_key("time_s")) else {
        return false;
    };
    // An event of a known name lacks its fields here.
    let alone = serde_json::Map::from_iter([("event".to_owned(), name.clone())]);
    Event::deserialize(Value::Object(alone)).is_err_and(|error| error.to_string().starts_with("unknown variant"))
}

/// JSON has no NaN, so the writer writes `null`; here it becomes NaN again. An absent value is left out of the line, so
/// `null` never means anything else.
fn parse_one(text: &str) -> Result<Line, serde_json::Error> {
    match serde_json::from_str(text) {
        Ok(line) => Ok(line),
        Err(_) => match serde_json::from_str(text)? {
            Value::Object(fields) => {
                Line::deserialize(MapDeserializer::new(fields.into_iter().map(|(name, value)| (name, Cell(value)))))
            }
            other => Line::deserialize(other),
        },
    }
}

/// A JSON value whose `null` reads as NaN.
struct Cell(Value);

impl<'de> Deserializer<'de> for Cell {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self.0 {
            Value::Null => visitor.visit_f64(f64::NAN),
            value => value.deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, serde_json::Error> for Cell {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use paceline_system::phase::Phase;

    use super::*;

    const WARNING: &str = r#"{"time_s":1.5,"rank":0,"event":"warning","message":"hot"}"#;
    const STEP: &str = r#"{"time_s":1.5,"rank":0,"event":"step","step":1,"epoch":0,"loss":null,"accuracy":0.5,"learning_rate":0.1,"samples":8,"seconds":0.1,"phases":{"data":0.1}}"#;
    const STARTED: &str = r#"{"time_s":0.0,"rank":0,"event":"run_started","schema":1,"version":"1","unix_s":1,"model":"m","data":"d","parameters":1,"resumed_step":3,"steps_total":9,"host":{"name":"h","cpu":"c","cores":1,"memory_bytes":1,"system":"s"},"config":"a = 1"}"#;

    fn read_text(text: &[u8]) -> Result<Vec<Line>, LabError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-0.jsonl");
        std::fs::write(&path, text).unwrap();
        read(&Disk::real(), &path)
    }

    #[test]
    fn a_damaged_middle_is_named_by_file_and_line() {
        let error = read_text(format!("{WARNING}\nrubbish\n{WARNING}\n").as_bytes()).unwrap_err().to_string();
        assert!(error.contains("rank-0.jsonl, line 2: not an event"), "{error}");
    }

    #[test]
    fn an_event_of_a_later_kind_is_passed_over() {
        const LATER: &str = r#"{"time_s":1.6,"rank":0,"event":"tea_break","cups":2}"#;
        let lines = read_text(format!("{STARTED}\n{LATER}\n{WARNING}\n").as_bytes()).unwrap();
        assert_eq!(lines.len(), 2);
        let spoiled = WARNING.replace("message", "massage");
        assert!(
            read_text(format!("{STARTED}\n{spoiled}\n{WARNING}\n").as_bytes()).is_err(),
            "a known kind has its fields"
        );
    }

    #[test]
    fn a_last_line_cut_inside_a_character_is_left_out() {
        let mut text = format!("{WARNING}\n").into_bytes();
        text.extend_from_slice(b"{\"time_s\":2.0,\"rank\":0,\"event\":\"warning\",\"message\":\"\xC3");
        assert_eq!(read_text(&text).unwrap().len(), 1);
    }

    #[test]
    fn a_line_cut_by_a_crash_does_not_swallow_the_resumed_process() {
        let lines = read_text(format!("{WARNING}\n{{\"time_s\":2.0,\"ra{STARTED}\n{WARNING}\n").as_bytes()).unwrap();
        assert_eq!(lines.len(), 3);
        assert!(matches!(&lines[1].event, Event::RunStarted { config, .. } if config == "a = 1"));
        let whole = read_text(format!("{WARNING}{STARTED}\n").as_bytes()).unwrap();
        assert_eq!(whole.len(), 2, "only the newline was cut");
    }

    #[test]
    fn a_cut_line_is_left_out_before_a_resumed_process_only() {
        const CUT: &str = r#"{"time_s":2.0,"ra"#;
        for between in [CUT.to_owned(), "\0\0\0".to_owned(), format!("{CUT}\n{}", &STARTED[..60])] {
            let lines = read_text(format!("{WARNING}\n{between}\n{STARTED}\n{WARNING}\n").as_bytes()).unwrap();
            assert_eq!(lines.len(), 3, "{between}");
            assert!(read_text(format!("{WARNING}\n{between}\n{WARNING}\n").as_bytes()).is_err(), "{between}");
        }
        assert!(read_text(b"rubbish\nrubbish\n").unwrap_err().to_string().contains("line 1: not an event"));
    }

    #[test]
    fn half_a_line_that_a_full_disk_took_does_not_hide_the_end() {
        let finished = r#"{"time_s":3.0,"rank":0,"event":"run_finished","step":1,"reason":"failed","seconds":3.0,"peak_memory_bytes":1}"#;
        let lines = read_text(format!("{WARNING}\n{}{finished}\n", &STEP[..50]).as_bytes()).unwrap();
        assert!(matches!(lines[1].event, Event::RunFinished { .. }) && lines.len() == 2, "{lines:?}");
    }

    #[test]
    fn a_loss_that_was_not_a_number_is_one_again() {
        let lines = read_text(format!("{STEP}\n{WARNING}\n").as_bytes()).unwrap();
        let Event::Step { loss, accuracy, phases, .. } = &lines[0].event else { panic!("{lines:?}") };
        assert!(loss.is_nan() && *accuracy == 0.5 && phases.get(Phase::Data) == Some(0.1));
    }

    #[test]
    fn a_later_schema_is_refused_by_its_number() {
        let text = STARTED.replace("\"schema\":1", "\"schema\":7");
        let error = read_text(format!("{text}\n").as_bytes()).unwrap_err().to_string();
        assert!(error.contains("event schema 7") && error.contains("line 1"), "{error}");
    }
}
