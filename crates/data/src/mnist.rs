//! MNIST (LeCun, Cortes and Burges, 1998) and sets in its format, such as Fashion-MNIST: idx files, gzipped or not.
//!
//! A header's numbers are checked against bounds and against the file before anything is allocated for them.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use paceline_system::disk::{Disk, DiskError};
use paceline_system::printable::Shown;

use crate::DataError;
use crate::dataset::{self, Info, OpenOptions, SampleKind, Source, Split};
use crate::pixels::Pixels;

/// idx: two zero bytes, the element type (8 is unsigned byte), the number of dims, then each dim as big-endian u32.
const TYPE_UBYTE: u8 = 8;
/// Bounds on foreign headers: a side, and the bytes of one file (the largest set in this format, EMNIST, has 548 MB).
const SIDE_MAX: usize = 1024;
const BYTES_MAX: usize = 1 << 30;
const CLASSES: usize = 10;

/// One half of MNIST, in memory.
#[derive(Debug)]
pub struct Mnist {
    info: Info,
    side: [usize; 2],
    labels: Vec<u8>,
    pixels: Vec<u8>,
}

/// Reads the header of an idx file of unsigned bytes with `N` dims. Gives them; the data follow `4 + 4N` bytes in.
///
/// # Errors
/// When it is another kind of file or announces more than any such set holds.
pub fn decode_header<const N: usize>(bytes: &[u8]) -> Result<[usize; N], String> {
    let header =
        bytes.get(..4 + 4 * N).ok_or_else(|| format!("{} bytes are too few for an idx header", bytes.len()))?;
    if header[..4] != [0, 0, TYPE_UBYTE, N as u8] {
        return Err(format!("it begins with {:?}, an idx file of {N} dims with [0, 0, 8, {N}]", &header[..4]));
    }
    let dims: [usize; N] = std::array::from_fn(|dim| {
        let at = 4 + 4 * dim;
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize
    });
    if dims[1..].iter().any(|side| !(1..=SIDE_MAX).contains(side)) {
        return Err(format!("it announces images of {:?} pixels; 1 to {SIDE_MAX} a side are possible", &dims[1..]));
    }
    match dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim)) {
        Some(0) => Err("it announces no samples".into()),
        Some(length) if length <= BYTES_MAX => Ok(dims),
        _ => Err(format!("it announces {dims:?} bytes; {BYTES_MAX} are possible")),
    }
}

/// Reads an idx file of unsigned bytes with `N` dims from a stream: its dims and its data, neither more nor less.
///
/// # Errors
/// When it is another kind of file, too short or too long.
pub fn decode<const N: usize>(mut stream: impl Read) -> Result<([usize; N], Vec<u8>), String> {
    let mut header = Vec::new();
    stream.by_ref().take(4 + 4 * N as u64).read_to_end(&mut header).map_err(|error| error.to_string())?;
    let dims = decode_header::<N>(&header)?;
    let length: usize = dims.iter().product();
    let mut data = Vec::new();
    // One byte more than announced shows a file that is too long. The buffer grows with what is really there.
    stream.take(length as u64 + 1).read_to_end(&mut data).map_err(|error| error.to_string())?;
    match data.len() {
        got if got == length => Ok((dims, data)),
        got if got < length => Err(format!("it is truncated: {got} bytes of data instead of {length}")),
        _ => Err(format!("it has more than the {length} bytes of data that its header announces")),
    }
}

impl Mnist {
    /// Reads both halves from a folder.
    ///
    /// # Errors
    /// When files are missing or are not what their names say.
    pub fn open(place: Option<&Path>, options: &OpenOptions, disk: &Disk) -> Result<(Self, Self), DataError> {
        let home = options.data_home.as_deref();
        let has = |folder: &Path| locate(folder, "train", "images", 3, disk).is_some();
        let folder = dataset::find(place, home, &["mnist", "MNIST/raw", "MNIST"], has).ok_or_else(|| {
            dataset::missing("mnist", place, home, "train-images-idx3-ubyte and its companions, .gz or not")
        })?;
        let half = |split, prefix| Self::read_half(&folder, split, prefix, disk);
        let (train, val) = (half(Split::Train, "train")?, half(Split::Val, "t10k")?);
        if train.side != val.side {
            return Err(DataError::refused(format!(
                "{} holds training images of {:?} pixels and test images of {:?}",
                Shown(&folder),
                train.side,
                val.side
            )));
        }
        Ok((train, val))
    }

    fn read_half(folder: &Path, split: Split, prefix: &str, disk: &Disk) -> Result<Self, DataError> {
        let (images, [count, height, width], pixels) = read_file::<3>(folder, prefix, "images", disk)?;
        let (file, [label_count], labels) = read_file::<1>(folder, prefix, "labels", disk)?;
        if label_count != count {
            let problem = format!("it has {label_count} labels for the {count} images of {}", Shown(&images));
            return Err(DataError::Malformed { file, problem });
        }
        if let Some(label) = labels.iter().find(|&&label| usize::from(label) >= CLASSES) {
            return Err(DataError::Malformed { file, problem: format!("it has class {label}, the greatest is 9") });
        }
        let info = Info {
            source: Source::Mnist,
            name: "mnist".into(),
            split,
            len: count,
            kind: SampleKind::Image { height, width, channels: 1 },
            classes: CLASSES,
            class_names: (0..CLASSES).map(|digit| digit.to_string()).collect(),
            // Over all pixels of the 60,000 training images of MNIST.
            mean: vec![0.1307],
            std: vec![0.3081],
        };
        Ok(Self { info, side: [height, width], labels, pixels })
    }

    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    pub(crate) fn label(&self, sample: usize) -> i32 {
        i32::from(self.labels[sample])
    }

    pub(crate) fn read(&self, sample: usize, image: &mut Pixels) -> i32 {
        let [height, width] = self.side;
        let bytes = height * width;
        image.copy_from(height, width, 1, &self.pixels[sample * bytes..][..bytes]);
        self.label(sample)
    }
}

/// The file by any of the names it goes by: with a dash or a dot, gzipped or not.
fn locate(folder: &Path, prefix: &str, what: &str, dims: usize, disk: &Disk) -> Option<PathBuf> {
    ["-", "."]
        .iter()
        .flat_map(|dash| ["", ".gz"].map(|end| folder.join(format!("{prefix}-{what}{dash}idx{dims}-ubyte{end}"))))
        .find(|file| disk.exists(file))
}

fn read_file<const N: usize>(
    folder: &Path,
    prefix: &str,
    what: &str,
    disk: &Disk,
) -> Result<(PathBuf, [usize; N], Vec<u8>), DataError> {
    let Some(file) = locate(folder, prefix, what, N, disk) else {
        let wanted = folder.join(format!("{prefix}-{what}-idx{N}-ubyte"));
        let source =
            std::io::Error::new(std::io::ErrorKind::NotFound, "there is no such file, nor one that ends in .gz");
        return Err(DiskError { verb: "read", path: wanted, source }.into());
    };
    let stream = disk.open(&file)?;
    let zipped = file.extension().is_some_and(|end| end == "gz");
    let decoded = if zipped { decode::<N>(GzDecoder::new(stream)) } else { decode::<N>(stream) };
    let (dims, data) = decoded.map_err(DataError::malformed(&file))?;
    Ok((file, dims, data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    fn idx(dims: &[u32], data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, dims.len() as u8];
        dims.iter().for_each(|dim| bytes.extend(dim.to_be_bytes()));
        bytes.extend(data);
        bytes
    }

    fn write_set(folder: &Path, zipped: bool) {
        for (prefix, count) in [("train", 6u32), ("t10k", 3)] {
            let images = idx(&[count, 2, 3], &(0..count * 6).map(|at| at as u8).collect::<Vec<_>>());
            let labels = idx(&[count], &(0..count).map(|at| (at % 10) as u8).collect::<Vec<_>>());
            for (name, bytes) in [("images-idx3", images), ("labels-idx1", labels)] {
                let mut out = std::fs::File::create(
                    folder.join(format!("{prefix}-{name}-ubyte{}", if zipped { ".gz" } else { "" })),
                )
                .unwrap();
                if zipped {
                    flate2::write::GzEncoder::new(out, flate2::Compression::fast()).write_all(&bytes).unwrap();
                } else {
                    out.write_all(&bytes).unwrap();
                }
            }
        }
    }

    #[test]
    fn plain_and_gzipped_files_give_the_same_samples() {
        for zipped in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            write_set(folder.path(), zipped);
            let (train, val) = Mnist::open(Some(folder.path()), &OpenOptions::default(), &Disk::real()).unwrap();
            assert_eq!((train.info.len, val.info.len), (6, 3));
            let mut image = Pixels::default();
            assert_eq!(train.read(4, &mut image), 4);
            assert_eq!(image, Pixels { height: 2, width: 3, channels: 1, data: (24..30).collect() });
        }
    }

    #[test]
    fn wrong_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        write_set(folder.path(), false);
        let open = || Mnist::open(Some(folder.path()), &OpenOptions::default(), &Disk::real()).unwrap_err().to_string();
        let labels = folder.path().join("t10k-labels-idx1-ubyte");
        std::fs::write(&labels, idx(&[2], &[0, 1])).unwrap();
        assert!(open().contains("2 labels for the 3 images"));
        std::fs::write(&labels, idx(&[3], &[0, 1, 77])).unwrap();
        assert!(open().contains("class 77"));
        std::fs::remove_file(&labels).unwrap();
        assert!(open().contains("t10k-labels-idx1-ubyte"));
    }

    #[test]
    fn a_header_is_believed_only_as_far_as_the_file_goes() {
        let problem = |bytes: &[u8]| decode::<3>(bytes).unwrap_err();
        assert!(problem(&idx(&[4_000_000_000, 28, 28], &[])).contains("are possible"));
        assert!(problem(&idx(&[1_000_000, 28, 28], &[1, 2])).contains("truncated: 2 bytes"));
        assert!(problem(&idx(&[1, 1, 1], &[1, 2])).contains("more than the 1 bytes"));
        assert!(problem(&idx(&[1, 0, 1], &[])).contains("[0, 1] pixels"));
        assert!(problem(&idx(&[1], &[1])).contains("too few"));
        assert!(problem(b"\x1f\x8bgzip or anything else").contains("begins with"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), dims: [u8; 3], tail in 0usize..9) {
            let _ = decode::<3>(&bytes[..]);
            let _ = decode::<1>(&bytes[..]);
            let _ = decode::<3>(GzDecoder::new(&bytes[..]));
            let _ = decode::<3>(&idx(&dims.map(u32::from), &vec![0; tail])[..]);
        }
    }
}
