//! Convolution and pooling by their definitions: a loop per index.

use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};

use super::array::Array;

pub fn conv2d(conv: &Conv2d, x: &Array, weight: &Array, bias: Option<&Array>) -> Array {
    let [batch, height, width, channels] = x.shape[..] else { panic!("an image has four dims") };
    let [kernel_h, kernel_w, depth, outputs] = weight.shape[..] else { panic!("a weight has four dims") };
    assert_eq!(depth, channels / conv.groups);
    let Padding { top, left, bottom, right } = conv.padding;
    let size = |size: usize, padding: usize, dim: usize| {
        (size + padding - conv.dilation[dim] * (conv.kernel[dim] - 1) - 1) / conv.stride[dim] + 1
    };
    let shape = [batch, size(height, top + bottom, 0), size(width, left + right, 1), outputs];
    Array::from_fn(&shape, |index| {
        let [n, row, column, output] = index[..] else { unreachable!() };
        let group = output / (outputs / conv.groups);
        let mut sum = bias.map_or(0.0, |bias| bias.at(&[output]));
        for i in 0..kernel_h {
            for j in 0..kernel_w {
                let h = (row * conv.stride[0] + i * conv.dilation[0]) as isize - top as isize;
                let w = (column * conv.stride[1] + j * conv.dilation[1]) as isize - left as isize;
                if !(0..height as isize).contains(&h) || !(0..width as isize).contains(&w) {
                    continue;
                }
                // Most of the op table's time is this sum, so the place of its first factors is looked up once.
                let pixels = &x.data[x.position(&[n, h as usize, w as usize, group * depth])..][..depth];
                let weights = weight.data[weight.position(&[i, j, 0, output])..].iter().step_by(outputs);
                sum += pixels.iter().zip(weights).map(|(pixel, weight)| pixel * weight).sum::<f64>();
            }
        }
        sum
    })
}

/// The pixels of one window along one dim, as a list, and the count that a mean with padding divides by.
fn pixels(pool: &Pool2d, dim: usize, index: usize, size: usize) -> (Vec<usize>, usize) {
    match pool.windows {
        Windows::Adaptive { output } => {
            let (start, end) = (index * size / output[dim], ((index + 1) * size).div_ceil(output[dim]));
            ((start..end).collect(), end - start)
        }
        Windows::Sliding { kernel, stride, padding, count_padding, .. } => {
            let (before, after) = [(padding.top, padding.bottom), (padding.left, padding.right)][dim];
            let window =
                (index * stride[dim]..index * stride[dim] + kernel[dim]).filter(|&p| p < size + before + after);
            let real: Vec<usize> =
                window.clone().filter(|&p| p >= before && p < before + size).map(|p| p - before).collect();
            let count = if count_padding { window.count() } else { real.len() };
            (real, count)
        }
    }
}

/// How many windows there are: as many as start before the padded end and, rounding up, before the right padding.
fn windows(pool: &Pool2d, dim: usize, size: usize) -> usize {
    match pool.windows {
        Windows::Adaptive { output } => output[dim],
        Windows::Sliding { kernel, stride, padding, ceil, .. } => {
            let (before, after) = [(padding.top, padding.bottom), (padding.left, padding.right)][dim];
            let padded = size + before + after;
            (0..padded)
                .filter(|index| {
                    let begin = index * stride[dim];
                    let fits = begin + kernel[dim] <= padded;
                    // One more when the last full window leaves pixels over.
                    let partial = ceil && begin < padded && begin + kernel[dim] < padded + stride[dim];
                    fits || (partial && begin < size + before)
                })
                .count()
        }
    }
}

/// The pooled image and, for maxima, the winning pixels.
pub fn pool2d(pool: &Pool2d, x: &Array) -> Vec<Array> {
    let [batch, height, width, channels] = x.shape[..] else { panic!("an image has four dims") };
    let shape = [batch, windows(pool, 0, height), windows(pool, 1, width), channels];
    let mut winners = Array::zeros(&shape);
    let y = Array::from_fn(&shape, |index| {
        let [n, row, column, c] = index[..] else { unreachable!() };
        let (rows, row_count) = pixels(pool, 0, row, height);
        let (columns, column_count) = pixels(pool, 1, column, width);
        let all: Vec<(f64, usize)> = rows
            .iter()
            .flat_map(|&h| columns.iter().map(move |&w| (h, w)))
            .map(|(h, w)| (x.at(&[n, h, w, c]), h * width + w))
            .collect();
        match pool.kind {
            PoolKind::Average => all.iter().map(|&(pixel, _)| pixel).sum::<f64>() / (row_count * column_count) as f64,
            PoolKind::Max => {
                let mut best = all[0];
                all.iter().for_each(|&other| best = if other.0 > best.0 { other } else { best });
                *winners.at_mut(index) = best.1 as f64;
                best.0
            }
        }
    });
    if pool.kind == PoolKind::Max { vec![y, winners] } else { vec![y] }
}
