//! Looking a set over: counts, sizes, class balance, mean and deviation, damage; and a contact sheet to see it with.
//! Called by `paceline data inspect`; decodes every image once.

use serde::Serialize;

use crate::dataset::{Dataset, Info, SampleKind};
use crate::decode::encode_png;
use crate::folder::Damage;
use crate::own::Own;
use crate::pixels::{Pixels, Window};
use crate::resize::Resizer;
use crate::{DataError, Split};

/// What was found in one half of a set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// The set's name.
    pub name: String,
    /// Which half.
    pub split: Split,
    /// Samples, damaged ones included.
    pub samples: usize,
    /// What a sample is.
    pub kind: SampleKind,
    /// Class names and how many samples each has. For a text: its characters and how often they are targets.
    pub classes: Vec<(String, usize)>,
    /// Least, mean and greatest height and width; nothing for a text.
    pub sizes: Option<Sizes>,
    /// Mean per channel, of 0 to 1.
    pub mean: Vec<f64>,
    /// Standard deviation per channel.
    pub std: Vec<f64>,
    /// Images that could not be decoded.
    pub damaged: Vec<Damage>,
}

/// The sizes of images.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sizes {
    /// Least height and width, not always of one image.
    pub least: [usize; 2],
    /// Mean height and width.
    pub mean: [f64; 2],
    /// Greatest height and width, not always of one image.
    pub greatest: [usize; 2],
}

impl Inspection {
    /// How many times more samples the largest class has than the smallest; infinite when a class has none.
    pub fn imbalance(&self) -> f64 {
        let counts = || self.classes.iter().map(|(_, count)| *count as f64);
        counts().fold(0.0, f64::max) / counts().fold(f64::INFINITY, f64::min)
    }
}

/// Looks at every sample of one half.
///
/// # Errors
/// When the disk refuses. Damaged images are no error here; they are listed.
pub fn inspect(dataset: &Dataset) -> Result<Inspection, DataError> {
    let info = dataset.info();
    let mut counts = vec![0; info.classes];
    let (mut sizes, mut moments, mut damaged) = (Tally::default(), Moments::default(), Vec::new());
    match info.kind {
        SampleKind::Tokens { sequence } => {
            let (mut tokens, mut targets) = (vec![0; sequence], vec![0; sequence]);
            for sample in 0..info.len {
                dataset.read_tokens(sample, &mut tokens, &mut targets)?;
                targets.iter().for_each(|&target| counts[target as usize] += 1);
            }
        }
        SampleKind::Image { .. } => {
            let mut image = Pixels::default();
            for sample in 0..info.len {
                match read(dataset, sample, &mut image)? {
                    Ok(class) => {
                        counts[class as usize] += 1;
                        sizes.add(&image);
                        moments.add(&image);
                    }
                    Err(damage) => damaged.push(damage),
                }
            }
        }
    }
    let (mean, std) = match dataset {
        Dataset::Own(own) if own.holds_numbers() => moments_of_numbers(own)?,
        _ => moments.mean_and_std(),
    };
    Ok(Inspection {
        name: info.name.clone(),
        split: info.split,
        samples: info.len,
        kind: info.kind,
        classes: info.class_names.iter().cloned().zip(counts).collect(),
        sizes: sizes.sizes(),
        mean,
        std,
        damaged,
    })
}

/// A picture of the set as PNG bytes: one row per class, `columns` samples each, small images enlarged in whole steps.
/// Nothing for a text, which has no pictures.
///
/// # Errors
/// When the disk refuses. A damaged image leaves its place black.
pub fn contact_sheet(dataset: &Dataset, columns: usize) -> Result<Option<Vec<u8>>, DataError> {
    const GAP: usize = 2;
    const CELL: usize = 64;
    /// A sheet of a thousand classes would be a wall; these many fit a screen or two.
    const ROWS_MAX: usize = 100;
    let info = dataset.info();
    if !matches!(info.kind, SampleKind::Image { .. }) {
        return Ok(None);
    }
    let chosen = choose(dataset, info, info.classes.min(ROWS_MAX), columns);
    let mut sheet = Pixels::default();
    let pitch = CELL + GAP;
    sheet.reshape(chosen.len() * pitch + GAP, columns * pitch + GAP, 3);
    sheet.data.fill(255);
    let (mut image, mut cell, mut resizer) = (Pixels::default(), Pixels::default(), Resizer::default());
    for (row, samples) in chosen.iter().enumerate() {
        for (column, &sample) in samples.iter().enumerate() {
            if read(dataset, sample, &mut image)?.is_err() {
                image.reshape(1, 1, 3);
                image.data.fill(0);
            }
            to_rgb(&mut image);
            let side = image.height.min(image.width);
            let middle = |long: usize| ((long - side) / 2) as isize;
            let window = Window { top: middle(image.height), left: middle(image.width), height: side, width: side };
            resizer.resize(&image, window, CELL, CELL, &mut cell);
            for line in 0..CELL {
                let at = ((row * pitch + GAP + line) * sheet.width + column * pitch + GAP) * 3;
                sheet.data[at..at + CELL * 3].copy_from_slice(&cell.data[line * CELL * 3..][..CELL * 3]);
            }
        }
    }
    Ok(Some(encode_png(&sheet)))
}

/// The first `columns` samples of each of the first `rows` classes.
fn choose(dataset: &Dataset, info: &Info, rows: usize, columns: usize) -> Vec<Vec<usize>> {
    let mut chosen = vec![Vec::new(); rows];
    for sample in 0..info.len {
        // A program's own set may give nonsense; reading it says so.
        let Some(class) = dataset.label(sample) else { continue };
        if let Some(row) = chosen.get_mut(class as usize).filter(|row| row.len() < columns) {
            row.push(sample);
        }
    }
    chosen
}

/// Decodes a sample without replacing damaged ones.
fn read(dataset: &Dataset, sample: usize, image: &mut Pixels) -> Result<Result<i32, Damage>, DataError> {
    match dataset {
        Dataset::Folder(folder) => folder.try_read(sample, image),
        other => other.read_image(sample, image).map(Ok),
    }
}

/// Repeats a single channel; drops what goes beyond three.
fn to_rgb(image: &mut Pixels) {
    let channels = image.channels;
    if channels == 3 {
        return;
    }
    let pixel = |pixel: &[u8]| [pixel[0], pixel[1.min(channels - 1)], pixel[2.min(channels - 1)]];
    image.data = image.data.chunks_exact(channels).flat_map(pixel).collect();
    image.channels = 3;
}

#[derive(Default)]
struct Tally {
    count: usize,
    least: [usize; 2],
    sum: [usize; 2],
    greatest: [usize; 2],
}

impl Tally {
    fn add(&mut self, image: &Pixels) {
        for (dim, side) in [image.height, image.width].into_iter().enumerate() {
            self.least[dim] = if self.count == 0 { side } else { self.least[dim].min(side) };
            self.greatest[dim] = self.greatest[dim].max(side);
            self.sum[dim] += side;
        }
        self.count += 1;
    }

    fn sizes(&self) -> Option<Sizes> {
        let mean = self.sum.map(|sum| sum as f64 / self.count.max(1) as f64);
        (self.count > 0).then_some(Sizes { least: self.least, mean, greatest: self.greatest })
    }
}

/// Exact sums of bytes and of their squares, so that the order of samples does not matter.
#[derive(Default)]
pub(crate) struct Moments {
    count: u64,
    sums: Vec<[u64; 2]>,
}

impl Moments {
    pub(crate) fn add(&mut self, image: &Pixels) {
        self.sums.resize(image.channels, [0; 2]);
        self.count += (image.height * image.width) as u64;
        for pixel in image.data.chunks_exact(image.channels) {
            for (sum, &value) in self.sums.iter_mut().zip(pixel) {
                sum[0] += u64::from(value);
                sum[1] += u64::from(value) * u64::from(value);
            }
        }
    }

    pub(crate) fn mean_and_std(&self) -> (Vec<f64>, Vec<f64>) {
        let count = self.count.max(1) as f64;
        let each = |[sum, squares]: &[u64; 2]| {
            let mean = *sum as f64 / count;
            (mean / 255.0, (*squares as f64 / count - mean * mean).max(0.0).sqrt() / 255.0)
        };
        self.sums.iter().map(each).unzip()
    }
}

/// Mean and deviation of every channel of images that are numbers.
fn moments_of_numbers(own: &Own) -> Result<(Vec<f64>, Vec<f64>), DataError> {
    let SampleKind::Image { height, width, channels } = own.info().kind else { return Ok((Vec::new(), Vec::new())) };
    let (mut values, mut sums) = (vec![0.0; height * width * channels], vec![[0.0f64; 2]; channels]);
    for sample in 0..own.info().len {
        own.read_values(sample, &mut values)?;
        for (at, &value) in values.iter().enumerate() {
            let (value, sum) = (f64::from(value), &mut sums[at % channels]);
            *sum = [sum[0] + value, sum[1] + value * value];
        }
    }
    let count = (own.info().len * height * width) as f64;
    let each = |[sum, squares]: &[f64; 2]| (sum / count, (squares / count - (sum / count).powi(2)).max(0.0).sqrt());
    Ok(sums.iter().map(each).unzip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::OpenOptions;
    use crate::decode::{DecodeLimits, decode_image};
    use paceline_system::disk::Disk;

    fn open(spec: &str) -> (Dataset, Dataset) {
        Dataset::open(&spec.parse().unwrap(), &OpenOptions::default(), &Disk::real()).unwrap()
    }

    #[test]
    fn uniform_bytes_have_the_moments_that_synthetic_suggests() {
        let (train, _) = open("synthetic:20x10x2/4/500");
        let found = inspect(&train).unwrap();
        assert_eq!(found.samples, 500);
        assert_eq!(found.classes.iter().map(|(_, count)| count).sum::<usize>(), 500);
        assert_eq!(found.sizes.unwrap().greatest, [10, 20]);
        for channel in 0..2 {
            assert!((found.mean[channel] - f64::from(train.info().mean[channel])).abs() < 0.005);
            assert!((found.std[channel] - f64::from(train.info().std[channel])).abs() < 0.005);
        }
        assert!(found.imbalance() < 1.5);
    }

    #[test]
    fn a_contact_sheet_has_a_row_per_class() {
        let (_, val) = open("shapes");
        let png = contact_sheet(&val, 8).unwrap().unwrap();
        let mut sheet = Pixels::default();
        decode_image(&png, DecodeLimits::for_side(64), &mut sheet).unwrap();
        assert_eq!((sheet.height, sheet.width), (10 * 66 + 2, 8 * 66 + 2));
    }

    #[test]
    fn damage_is_listed_and_not_refused() {
        let folder = tempfile::tempdir().unwrap();
        for half in ["train", "val"] {
            std::fs::create_dir_all(folder.path().join(half).join("a")).unwrap();
            std::fs::write(folder.path().join(half).join("a/good.jpg"), crate::decode::tests::jpeg(9, 5)).unwrap();
            std::fs::write(folder.path().join(half).join("a/bad.jpg"), b"bad").unwrap();
        }
        let (train, _) = open(&format!("folder:{}", folder.path().display()));
        let found = inspect(&train).unwrap();
        assert_eq!((found.samples, found.damaged.len()), (2, 1));
        assert!(found.damaged[0].file.ends_with("train/a/bad.jpg"));
        assert!(contact_sheet(&train, 3).unwrap().is_some());
    }

    #[test]
    fn a_text_has_counts_and_no_sheet() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text");
        std::fs::write(&file, "ab".repeat(3000)).unwrap();
        let (train, _) = open(&format!("text:{}", file.display()));
        let found = inspect(&train).unwrap();
        assert_eq!(found.classes.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(found.sizes.is_none() && contact_sheet(&train, 3).unwrap().is_none());
    }
}
