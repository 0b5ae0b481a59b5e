//! Resizing as Pillow does it: bilinear with a support that grows when shrinking, so that no pixel is skipped.

use fast_image_resize::images::{CroppedImage, Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer as Engine};

use crate::pixels::{Pixels, Window};

/// Resizes images; holds the buffers that a resize needs, so that the next one allocates nothing.
#[derive(Debug, Default)]
pub struct Resizer(Engine);

impl Resizer {
    /// Writes the part of `source` inside `window`, `height` × `width` large, to `target`.
    ///
    /// # Panics
    /// When the window reaches outside the image or is empty.
    pub fn resize(&mut self, source: &Pixels, window: Window, height: usize, width: usize, target: &mut Pixels) {
        let inside = window.top >= 0
            && window.left >= 0
            && window.top as usize + window.height <= source.height
            && window.left as usize + window.width <= source.width;
        assert!(inside && window.height > 0 && window.width > 0, "{window:?} of {}×{}", source.height, source.width);
        target.reshape(height, width, source.channels);
        let kind = match source.channels {
            1 => PixelType::U8,
            2 => PixelType::U8x2,
            3 => PixelType::U8x3,
            4 => PixelType::U8x4,
            channels => panic!("images have 1 to 4 channels, not {channels}"),
        };
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).use_alpha(false);
        let whole = ImageRef::new(source.width as u32, source.height as u32, &source.data, kind).expect("its own size");
        // A view, not the resizer's own crop: that one lets pixels beyond the window's edge shine in.
        let [left, top] = [window.left, window.top].map(|start| start as u32);
        let part = CroppedImage::new(&whole, left, top, window.width as u32, window.height as u32).expect("inside");
        let mut into =
            Image::from_slice_u8(width as u32, height as u32, &mut target.data, kind).expect("just reshaped");
        self.0.resize(&part, &mut into, &options).expect("pixel types agree");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(image: &Pixels) -> Window {
        Window { top: 0, left: 0, height: image.height, width: image.width }
    }

    #[test]
    fn shrinking_averages_over_every_pixel() {
        let mut checker = Pixels::default();
        checker.reshape(64, 64, 3);
        for (at, value) in checker.data.iter_mut().enumerate() {
            *value = if (at / 3 % 64 + at / 3 / 64) % 2 == 0 { 0 } else { 200 };
        }
        let mut small = Pixels::default();
        Resizer::default().resize(&checker, whole(&checker), 8, 8, &mut small);
        assert!(small.data.iter().all(|&value| (95..=105).contains(&value)), "{:?}", small.data);
    }

    #[test]
    fn growing_interpolates_between_pixel_centres() {
        // By hand: target centres lie at source positions -0.25, 0.25, 0.75, 1.25, and the edges repeat.
        let source = Pixels { height: 1, width: 2, channels: 1, data: vec![0, 200] };
        let mut large = Pixels::default();
        Resizer::default().resize(&source, whole(&source), 1, 4, &mut large);
        assert_eq!(large.data, [0, 50, 150, 200]);
    }

    #[test]
    fn a_window_keeps_what_is_outside_out() {
        let source = Pixels { height: 2, width: 4, channels: 1, data: vec![9, 9, 70, 70, 9, 9, 70, 70] };
        let mut target = Pixels::default();
        Resizer::default().resize(&source, Window { top: 0, left: 2, height: 2, width: 2 }, 5, 5, &mut target);
        assert!(target.data.iter().all(|&value| value == 70));
    }
}
