//! One decoded image: bytes in rows of pixels of interleaved channels, in a buffer that is used again and again.

/// An 8-bit image, height × width × channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pixels {
    /// Rows.
    pub height: usize,
    /// Pixels per row.
    pub width: usize,
    /// Values per pixel.
    pub channels: usize,
    /// The values, row after row, a pixel's channels side by side.
    pub data: Vec<u8>,
}

impl Pixels {
    /// Takes another shape. The values are whatever the buffer held before, or zero.
    pub fn reshape(&mut self, height: usize, width: usize, channels: usize) {
        (self.height, self.width, self.channels) = (height, width, channels);
        self.data.resize(height * width * channels, 0);
    }

    /// Becomes a copy of `data`.
    pub fn copy_from(&mut self, height: usize, width: usize, channels: usize, data: &[u8]) {
        assert_eq!(data.len(), height * width * channels, "an image's bytes are height × width × channels");
        (self.height, self.width, self.channels) = (height, width, channels);
        self.data.clear();
        self.data.extend_from_slice(data);
    }

    /// Bytes in one row.
    pub fn row_bytes(&self) -> usize {
        self.width * self.channels
    }

    /// Mirrors left and right.
    pub fn flip(&mut self) {
        let row_bytes = self.row_bytes();
        if row_bytes == 0 {
            return;
        }
        for row in self.data.chunks_exact_mut(row_bytes) {
            match self.channels {
                3 => row.as_chunks_mut::<3>().0.reverse(),
                1 => row.reverse(),
                channels => {
                    row.reverse();
                    row.chunks_exact_mut(channels).for_each(<[u8]>::reverse);
                }
            }
        }
    }

    /// Gives the pixels of a window one colour; what is outside the image is left out.
    pub fn paint(&mut self, window: Window, colour: &[u8]) {
        assert_eq!(colour.len(), self.channels, "a colour has a value per channel");
        let cut = |from: isize, length: usize, most: usize| {
            let end = (from + length as isize).clamp(0, most as isize) as usize;
            (from.clamp(0, most as isize) as usize).min(end)..end
        };
        let (rows, columns) = (cut(window.top, window.height, self.height), cut(window.left, window.width, self.width));
        for row in rows {
            let start = row * self.row_bytes();
            let line = &mut self.data[start + columns.start * colour.len()..start + columns.end * colour.len()];
            line.chunks_exact_mut(colour.len()).for_each(|pixel| pixel.copy_from_slice(colour));
        }
    }

    /// Becomes `source` moved up and left by so many pixels, which may be negative; what comes in is the image reflected at its edge.
    pub fn reflected_window_of(&mut self, source: &Pixels, (top, left): (isize, isize)) {
        let (channels, bytes) = (source.channels, source.row_bytes());
        self.reshape(source.height, source.width, channels);
        for row in 0..source.height {
            let line = &source.data[reflect(row as isize + top, source.height) * bytes..][..bytes];
            for column in 0..source.width {
                let from = reflect(column as isize + left, source.width) * channels;
                let to = row * bytes + column * channels;
                self.data[to..to + channels].copy_from_slice(&line[from..from + channels]);
            }
        }
    }

    /// Becomes the `height` × `width` window of `source` whose upper left corner is at (`top`, `left`), which may lie
    /// outside; what is outside is black.
    pub fn window_of(&mut self, source: &Pixels, window: Window) {
        let channels = source.channels;
        self.reshape(window.height, window.width, channels);
        let clip = |at: isize, most: usize| at.clamp(0, most as isize) as usize;
        let first = clip(window.left, source.width);
        let last = clip(window.left + window.width as isize, source.width);
        let before = (first as isize - window.left).clamp(0, window.width as isize) as usize * channels;
        let inside = (last - first) * channels;
        for (row, target) in self.data.chunks_exact_mut((window.width * channels).max(1)).enumerate() {
            let from = window.top + row as isize;
            if from < 0 || from >= source.height as isize || inside == 0 {
                target.fill(0);
                continue;
            }
            let at = from as usize * source.row_bytes() + first * channels;
            target[..before].fill(0);
            target[before..before + inside].copy_from_slice(&source.data[at..at + inside]);
            target[before + inside..].fill(0);
        }
    }
}

/// Where a place is found in an image of so many pixels that goes on as in a mirror; the pixel at the edge is not repeated.
fn reflect(at: isize, length: usize) -> usize {
    let last = length.max(1) as isize - 1;
    let there = at.abs();
    (if there > last { 2 * last - there } else { there }).clamp(0, last) as usize
}

/// A rectangle of an image, possibly reaching outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First row.
    pub top: isize,
    /// First column.
    pub left: isize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(height: usize, width: usize, channels: usize) -> Pixels {
        Pixels { height, width, channels, data: (1..=(height * width * channels) as u8).collect() }
    }

    #[test]
    fn a_flip_mirrors_pixels_and_keeps_their_channels() {
        for channels in 1..=4 {
            let image = numbered(3, 5, channels);
            let mut flipped = image.clone();
            flipped.flip();
            for (row, column, channel) in
                (0..3).flat_map(|r| (0..5).flat_map(move |c| (0..channels).map(move |k| (r, c, k))))
            {
                let at = |column: usize| (row * 5 + column) * channels + channel;
                assert_eq!(flipped.data[at(4 - column)], image.data[at(column)]);
            }
        }
    }

    #[test]
    fn a_window_is_black_outside_the_image() {
        let image = numbered(2, 2, 1);
        let mut window = Pixels::default();
        window.window_of(&image, Window { top: -1, left: -1, height: 4, width: 4 });
        assert_eq!(window.data, [0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 0, 0, 0]);
        window.window_of(&image, Window { top: 1, left: 1, height: 2, width: 1 });
        assert_eq!(window.data, [4, 0]);
        window.window_of(&image, Window { top: 5, left: -9, height: 1, width: 2 });
        assert_eq!(window.data, [0, 0]);
    }
}
