//! The patches of an image as a matrix: a row per output pixel, a column per (tap, channel). It exists only in panels.

use std::ops::Range;

use super::super::gemm::pack::{Layout, Left, copy};
use super::axis::Axis;

/// Pixels whose coordinates are worked out at a time.
const CHUNK: usize = 32;

/// The patch matrix of one sweep. With `AlongDepth` rows are pixels, with `AlongRows` it is the transpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patches<'a> {
    pub image: &'a [f32],
    pub axes: [Axis; 2],
    /// Channels of the image, and how many of them belong to one group.
    pub channels: usize,
    pub group_channels: usize,
    pub layout: Layout,
}

/// Where a pixel's patch begins.
#[derive(Clone, Copy, Default)]
struct Corner {
    image: usize,
    row: isize,
    column: isize,
}

impl Left for Patches<'_> {
    fn layout(&self) -> Layout {
        self.layout
    }

    fn pack(&self, group: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], stride: usize) {
        let (pixels, features) = match self.layout {
            Layout::AlongDepth => (rows, depth),
            Layout::AlongRows => (depth, rows),
        };
        let mut corners = [Corner::default(); CHUNK];
        for start in pixels.clone().step_by(CHUNK) {
            let count = CHUNK.min(pixels.end - start);
            self.corners(start, &mut corners[..count]);
            let panel = &mut panel[(start - pixels.start) * stride..];
            self.gather(&corners[..count], group * self.group_channels, features.clone(), panel, stride);
        }
    }
}

impl Patches<'_> {
    fn corners(&self, first: usize, corners: &mut [Corner]) {
        let [rows, columns] = [self.axes[0].outputs, self.axes[1].outputs];
        let (mut column, line) = (first % columns, first / columns);
        let (mut row, mut image) = (line % rows, line / rows);
        for corner in corners {
            *corner = Corner { image, row: self.axes[0].start(row), column: self.axes[1].start(column) };
            column += 1;
            if column == columns {
                (column, row) = (0, row + 1);
            }
            if row == rows {
                (row, image) = (0, image + 1);
            }
        }
    }

    /// Copies the features of the pixels at `corners`, pixel after pixel, `stride` apart.
    fn gather(&self, corners: &[Corner], channel: usize, features: Range<usize>, panel: &mut [f32], stride: usize) {
        let [down, across] = &self.axes;
        // Taps side by side in the image are one run, if all channels are taken.
        let merged = across.delta == 1 && self.group_channels == self.channels;
        let (taps, runs_per_row) = if merged { (across.taps, 1) } else { (1, across.taps) };
        let length = taps * self.group_channels;
        let mut begin = features.start;
        while begin < features.end {
            let run = begin / length;
            let end = features.end.min((run + 1) * length);
            let part = begin - run * length..end - run * length;
            let (tap_row, tap_column) = (run / runs_per_row, run % runs_per_row);
            for (index, corner) in corners.iter().enumerate() {
                let target = &mut panel[index * stride + begin - features.start..][..part.len()];
                let row = corner.row + (tap_row * down.delta) as isize;
                let column = corner.column + (tap_column * across.delta) as isize;
                if row < 0 || row >= down.size as isize {
                    target.fill(0.0);
                    continue;
                }
                let line = (corner.image * down.size + row as usize) * across.size;
                if column >= 0 && column as usize + taps <= across.size {
                    let source = (line + column as usize) * self.channels + channel;
                    copy(&self.image[source + part.start..], target);
                } else {
                    self.copy_clipped(line, column, taps, part.clone(), channel, target);
                }
            }
            begin = end;
        }
    }

    /// As the copy of a run, where some of its taps lie outside the image row that begins at pixel `line`.
    fn copy_clipped(
        &self,
        line: usize,
        column: isize,
        taps: usize,
        part: Range<usize>,
        channel: usize,
        target: &mut [f32],
    ) {
        let low = column.min(0).unsigned_abs().min(taps) * self.group_channels;
        let high = (self.axes[1].size as isize - column).clamp(0, taps as isize) as usize * self.group_channels;
        let (low, high) = (low.clamp(part.start, part.end), high.clamp(part.start, part.end));
        if low >= high {
            target.fill(0.0);
            return;
        }
        // More than one tap means that a pixel is all its channels, so the run is contiguous from its first tap on.
        let start = (line as isize + column) * self.channels as isize + (channel + low) as isize;
        target[..low - part.start].fill(0.0);
        copy(&self.image[start as usize..], &mut target[low - part.start..high - part.start]);
        target[high - part.start..].fill(0.0);
    }
}
