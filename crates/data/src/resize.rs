//! Resizing as Pillow does it: bilinear with a support that grows when shrinking, so that no pixel is skipped.
//! Agrees with Pillow to one level of 255.

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::{U8, U8x2, U8x3, U8x4};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer as Engine};

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
        // By type, not by value: the engine would be compiled into this crate for every pixel type it knows otherwise.
        match source.channels {
            1 => self.typed::<U8>(source, window, target),
            2 => self.typed::<U8x2>(source, window, target),
            3 => self.typed::<U8x3>(source, window, target),
            4 => self.typed::<U8x4>(source, window, target),
            channels => panic!("images have 1 to 4 channels, not {channels}"),
        }
    }

    fn typed<P: PixelTrait>(&mut self, source: &Pixels, window: Window, target: &mut Pixels) {
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).use_alpha(false);
        let [height, width] = [source.height, source.width].map(|size| size as u32);
        let whole = TypedImageRef::<P>::from_buffer(width, height, &source.data).expect("its own size");
        // A view, not the resizer's own crop: that one lets pixels beyond the window's edge shine in.
        let [left, top] = [window.left, window.top].map(|start| start as u32);
        let part = TypedCroppedImage::from_ref(&whole, left, top, window.width as u32, window.height as u32);
        let part = part.expect("inside");
        let [height, width] = [target.height, target.width].map(|size| size as u32);
        let mut into = TypedImage::<P>::from_buffer(width, height, &mut target.data).expect("just reshaped");
        self.0.resize_typed(&part, &mut into, &options).expect("no alpha is asked for");
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

    #[test]
    fn results_are_those_of_pillow_to_one_level() {
        // Image.resize(size, Image.BILINEAR) of Pillow 13.0.0 on RGB pixels of (37 x + 91 y + 53 c) mod 256.
        let smaller: [u8; 36] = [
            101, 129, 135, 130, 152, 132, 121, 126, 138, 106, 129, 137, 119, 133, 139, 111, 129, 130, 126, 144, 133,
            122, 136, 141, 126, 149, 131, 129, 134, 136, 103, 125, 129, 126, 154, 130,
        ];
        let larger: [u8; 90] = [
            0, 53, 106, 19, 72, 125, 43, 96, 149, 68, 121, 174, 93, 146, 199, 111, 164, 217, 36, 89, 142, 55, 108, 161,
            79, 132, 168, 104, 157, 125, 129, 182, 133, 147, 200, 151, 91, 144, 197, 110, 163, 216, 134, 187, 197, 159,
            212, 52, 184, 237, 34, 202, 255, 52, 146, 199, 98, 165, 141, 117, 163, 88, 124, 86, 113, 81, 85, 138, 89,
            103, 156, 107, 182, 235, 32, 201, 126, 51, 182, 22, 75, 37, 47, 100, 19, 72, 125, 37, 90, 143,
        ];
        for ([rows, columns, height, width], expected) in [([8, 10, 3, 4], &smaller[..]), ([3, 4, 5, 6], &larger[..])] {
            let value = |at: usize| (at / 3 % columns * 37 + at / 3 / columns * 91 + at % 3 * 53) as u8;
            let data = (0..rows * columns * 3).map(value).collect();
            let source = Pixels { height: rows, width: columns, channels: 3, data };
            let mut target = Pixels::default();
            Resizer::default().resize(&source, whole(&source), height, width, &mut target);
            // The two passes round to bytes in another order than Pillow's: one level of 255 at most.
            assert_eq!(target.data.len(), expected.len());
            assert!(
                target.data.iter().zip(expected).all(|(got, expected)| got.abs_diff(*expected) <= 1),
                "{:?}",
                target.data
            );
        }
    }
}
