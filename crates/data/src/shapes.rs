//! `shapes`: ten classes of figures drawn by code, 32 × 32 RGB. It needs no download, and it is not trivial.
//!
//! A figure has a random place, size and turn and two random colours over a background with a gradient, specks and
//! noise, so that no pixel says anything by itself: a linear model hardly does better than guessing, while a small
//! convolutional network reads edges and passes 97%. A sample is a pure function of (seed, half, number), made of
//! additions, multiplications, divisions and square roots only, which every machine rounds in the same way.
//!
//! How a figure is drawn: `Figure::distance` gives the signed distance of a point to the figure's edge, negative
//! inside; a pixel's coverage is that distance clamped to one pixel, which gives smooth edges at the price of one
//! evaluation per pixel. One image costs about 18 µs; all are drawn at opening.

use paceline_system::random::Random;
use paceline_system::threads;

use crate::DataError;
use crate::dataset::{Info, SampleKind, Source, Split};
use crate::pixels::Pixels;

use figure::Figure;

mod figure;

const SIDE: usize = 32;
const IMAGE: usize = SIDE * SIDE * 3;
/// The seed of the set that everyone gets, so that accuracies can be compared.
const SEED: u64 = 2024;
const TRAIN_LEN: usize = 8_000;
const VAL_LEN: usize = 2_000;
/// Of both halves, in memory.
pub(crate) const BYTES: usize = (TRAIN_LEN + VAL_LEN) * IMAGE;
/// Names the streams of this set.
const SHAPES: u64 = 0x5348_4150;

/// One half of the set, in memory.
#[derive(Debug)]
pub struct Shapes {
    info: Info,
    pixels: Vec<u8>,
}

impl Shapes {
    /// Draws both halves on `threads` threads.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn open(threads: usize) -> Result<(Self, Self), DataError> {
        let half = |split, len| {
            Ok::<_, DataError>(Self { info: info(split, len), pixels: draw_all(split, len, threads.max(1))? })
        };
        Ok((half(Split::Train, TRAIN_LEN)?, half(Split::Val, VAL_LEN)?))
    }

    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    pub(crate) fn label(&self, sample: usize) -> i32 {
        assert!(sample < self.info.len, "sample {sample} of {}", self.info.len);
        label(sample) as i32
    }

    pub(crate) fn read(&self, sample: usize, image: &mut Pixels) -> i32 {
        image.copy_from(SIDE, SIDE, 3, &self.pixels[sample * IMAGE..][..IMAGE]);
        self.label(sample)
    }
}

/// What there is to know of a half.
fn info(split: Split, len: usize) -> Info {
    Info {
        source: Source::Shapes,
        name: "shapes".into(),
        split,
        len,
        kind: SampleKind::Image { height: SIDE, width: SIDE, channels: 3 },
        classes: Figure::ALL.len(),
        class_names: Figure::ALL.map(|figure| figure.name().to_owned()).to_vec(),
        // Of the training half; a test measures them again.
        mean: vec![0.4982, 0.4966, 0.4979],
        std: vec![0.2446, 0.2439, 0.2456],
    }
}

/// What there is to know of the training half before it is drawn.
pub(crate) fn outline() -> Info {
    info(Split::Train, TRAIN_LEN)
}

/// Classes take turns, so that every class has the same number of samples.
fn label(sample: usize) -> usize {
    sample % Figure::ALL.len()
}

fn draw_all(split: Split, len: usize, threads: usize) -> Result<Vec<u8>, DataError> {
    let part = move |from: usize, to: usize| {
        let mut pixels = Vec::with_capacity((to - from) * IMAGE);
        (from..to).for_each(|sample| pixels.extend_from_slice(&draw(SEED, split, sample)));
        pixels
    };
    let cut = |thread: usize| len * thread / threads;
    let others = (1..threads)
        .map(|thread| {
            let (from, to) = (cut(thread), cut(thread + 1));
            threads::spawn("shapes", move || part(from, to)).map_err(DataError::Thread)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut pixels = part(0, cut(1));
    for other in others {
        pixels.extend(other.join().expect("drawing does not panic"));
    }
    Ok(pixels)
}

type Colour = [f32; 3];

/// Draws one sample.
fn draw(seed: u64, split: Split, sample: usize) -> [u8; IMAGE] {
    let random = &mut Random::new(&[SHAPES, seed, split as u64, sample as u64]);
    let figure = Figure::ALL[label(sample)];
    let radius = random.range(8.0, 12.5);
    let reach = SIDE as f32 / 2.0 - radius - 0.5;
    let centre = [0, 1].map(|_| SIDE as f32 / 2.0 + random.range(-reach, reach));
    let [cosine, sine] = direction(random);
    let (back, front) = two_colours(random);
    let mut canvas = background(back, front, random);
    for row in 0..SIDE {
        for column in 0..SIDE {
            let (x, y) = (column as f32 + 0.5 - centre[0], row as f32 + 0.5 - centre[1]);
            if x * x + y * y > (radius + 1.0) * (radius + 1.0) {
                continue;
            }
            let turned = [(x * cosine + y * sine) / radius, (y * cosine - x * sine) / radius];
            let coverage = (0.5 - figure.distance(turned) * radius).clamp(0.0, 1.0);
            let pixel = &mut canvas[row * SIDE + column];
            for channel in 0..3 {
                pixel[channel] += (front[channel] - pixel[channel]) * coverage;
            }
        }
    }
    finish(&canvas, random)
}

/// A gradient from the background's colour to a neighbour of it, and up to four specks of any colour.
fn background(back: Colour, front: Colour, random: &mut Random) -> [Colour; SIDE * SIDE] {
    let [along, across] = direction(random);
    let strength = [0, 1, 2].map(|_| random.range(-0.12, 0.12));
    let mut canvas = [[0.0; 3]; SIDE * SIDE];
    for (at, pixel) in canvas.iter_mut().enumerate() {
        let middle = SIDE as f32 / 2.0;
        let place = ((at % SIDE) as f32 - middle) * along + ((at / SIDE) as f32 - middle) * across;
        *pixel = std::array::from_fn(|channel| back[channel] + strength[channel] * place / middle);
    }
    for _ in 0..random.below(5) {
        let colour = if random.chance(0.5) { front } else { [0, 1, 2].map(|_| random.uniform()) };
        let (row, column) = (random.below(SIDE - 1), random.below(SIDE - 1));
        for at in [0, 1, SIDE, SIDE + 1] {
            canvas[row * SIDE + column + at] = colour;
        }
    }
    canvas
}

/// Adds noise of ±9 of 255, triangular: the difference of two nibbles of one random word, a third of a word per pixel.
fn finish(canvas: &[Colour; SIDE * SIDE], random: &mut Random) -> [u8; IMAGE] {
    let mut bytes = [0; IMAGE];
    for (pixels, out) in canvas.as_chunks::<2>().0.iter().zip(bytes.as_chunks_mut::<6>().0) {
        let mut word = random.next_u64();
        for (out, value) in out.iter_mut().zip(pixels.as_flattened()) {
            let noise = (word & 15) as f32 - (word >> 4 & 15) as f32;
            word >>= 8;
            *out = (value * 255.0 + noise * 0.6).clamp(0.0, 255.0) as u8;
        }
    }
    bytes
}

/// Two colours that differ clearly in brightness or hue, neither of them too dark or too bright for the gradient.
fn two_colours(random: &mut Random) -> (Colour, Colour) {
    let mut colour = || [0, 1, 2].map(|_| random.range(0.08, 0.92));
    let back = colour();
    loop {
        let front = colour();
        let apart: f32 = back.iter().zip(front).map(|(back, front)| (back - front) * (back - front)).sum();
        if apart > 0.25 {
            return (back, front);
        }
    }
}

/// A random direction as cosine and sine, without trigonometry: a point of the disc, drawn from the square until it
/// falls inside, brought to length one.
fn direction(random: &mut Random) -> [f32; 2] {
    loop {
        let [x, y] = [0, 1].map(|_| random.range(-1.0, 1.0));
        let square = x * x + y * y;
        if (0.01..=1.0).contains(&square) {
            let length = square.sqrt();
            return [x / length, y / length];
        }
    }
}

#[cfg(test)]
mod tests;
