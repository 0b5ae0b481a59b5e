//! What processes print, each line with its rank in front: `[1] epoch 3 …`. They have no terminal, so that they have no
//! use for its control characters; those that come all the same, from another machine's greeting perhaps, are escaped.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use paceline_system::printable::printable_lines;

/// A line that is longer is broken: a process that prints no line breaks must not fill the memory.
const LINE_BYTES_MAX: u64 = 16 << 10;

/// Where lines go. Cheap to clone.
#[derive(Clone)]
pub struct Output(Arc<Mutex<Box<dyn Write + Send>>>);

impl Output {
    /// Lines go here.
    pub fn to(target: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Box::new(target))))
    }

    /// Copies until the source ends. What cannot be written (a closed pipe) is dropped: the process goes on.
    pub(super) fn copy(&self, prefix: &str, source: impl Read) {
        let mut source = BufReader::new(source);
        let mut line = Vec::new();
        loop {
            line.clear();
            line.extend_from_slice(prefix.as_bytes());
            match source.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            let mut target = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = target.write_all(shown(&line).as_bytes()).and_then(|()| target.flush());
        }
    }
}

impl std::fmt::Debug for Output {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Output")
    }
}

/// A line as it may be shown; bytes that are not text as their numbers.
fn shown(line: &[u8]) -> String {
    let mut shown = String::with_capacity(line.len());
    for chunk in line.utf8_chunks() {
        shown += &printable_lines(chunk.valid());
        chunk.invalid().iter().for_each(|byte| shown += &format!("\\x{byte:02x}"));
    }
    shown
}

/// The prefix of a rank, as wide as the widest.
pub(super) fn prefix(rank: usize, world: usize) -> String {
    let width = world.saturating_sub(1).to_string().len();
    format!("[{rank:width$}] ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn every_line_has_its_rank_and_long_ones_are_broken() {
        let sink = Sink::default();
        Output::to(sink.clone()).copy(&prefix(1, 12), &b"one\n\x1b[2J\xFF\nlast"[..]);
        assert_eq!(*sink.0.lock().unwrap(), b"[ 1] one\n[ 1] \\u{1b}[2J\\xff\n[ 1] last\n");
        let sink = Sink::default();
        Output::to(sink.clone()).copy("", &[b'x'; 20 << 10][..]);
        assert_eq!(sink.0.lock().unwrap().iter().filter(|byte| **byte == b'\n').count(), 2);
    }
}
