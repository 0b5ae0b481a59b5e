//! Whether a file is still what was written: its length and its CRC-32C, which the CPU computes faster than memory is read.
//!
//! It finds what disks, copies and half-finished tools do to files: every flipped bit, every burst of up to 32 bits, and all but one in
//! four billion of other changes. It is no protection against somebody who means to deceive.

use std::fmt;
use std::io::{self, Write};

/// The length and checksum of some bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum {
    /// How many bytes.
    pub bytes: u64,
    /// Their CRC-32C (Castagnoli), as iSCSI, ext4 and TensorBoard have it.
    pub crc32c: u32,
}

impl Checksum {
    /// Of all of them.
    pub fn of(bytes: &[u8]) -> Self {
        let mut sum = Self::default();
        sum.add(bytes);
        sum
    }

    /// Of what came before, and these behind it.
    pub fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
    }
}

/// The checksum alone, in eight hexadecimal digits.
impl fmt::Display for Checksum {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:08x}", self.crc32c)
    }
}

/// Passes bytes on, and sums them up while they are in the caches.
pub struct Summing<'a> {
    target: &'a mut dyn Write,
    sum: Checksum,
}

impl<'a> Summing<'a> {
    /// In front of this target.
    pub fn new(target: &'a mut dyn Write) -> Self {
        Self { target, sum: Checksum::default() }
    }

    /// Of all that was written.
    pub fn finish(self) -> Checksum {
        self.sum
    }
}

impl Write for Summing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.target.write(bytes)?;
        self.sum.add(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_published_one_and_can_be_taken_in_parts() {
        // The check value of CRC-32/ISCSI.
        assert_eq!(Checksum::of(b"123456789"), Checksum { bytes: 9, crc32c: 0xe306_9283 });
        let mut target = Vec::new();
        let mut summing = Summing::new(&mut target);
        summing.write_all(b"1234").unwrap();
        summing.write_all(b"56789").unwrap();
        assert_eq!(summing.finish().to_string(), "e3069283");
        assert_eq!(target, b"123456789");
    }
}
