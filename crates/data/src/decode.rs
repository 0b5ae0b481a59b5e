//! JPEG and PNG bytes to RGB pixels. Bytes come from anywhere: sizes are bounded, and a file that ends early is damaged.

use image::ImageFormat;

use crate::pixels::Pixels;

/// The longest side a picture may have.
const SIDE_MAX: u32 = 32_768;

/// Decodes one image to RGB.
///
/// # Errors
/// What is wrong with the bytes.
pub fn decode_image(bytes: &[u8], image: &mut Pixels) -> Result<(), String> {
    if bytes.is_empty() {
        return Err("the file is empty".into());
    }
    let format = image::guess_format(bytes).map_err(|_| "it is neither JPEG nor PNG".to_owned())?;
    if !matches!(format, ImageFormat::Jpeg | ImageFormat::Png) {
        return Err("it is neither JPEG nor PNG".into());
    }
    if format == ImageFormat::Jpeg && !jpeg_is_whole(bytes) {
        return Err("the file ends before its picture does".into());
    }
    // The library's own limits hold here: at most 512 MiB for one picture.
    let decoded = image::load_from_memory_with_format(bytes, format).map_err(|error| error.to_string())?.into_rgb8();
    let (width, height) = decoded.dimensions();
    if width == 0 || height == 0 {
        return Err("it has no pixels".into());
    }
    if width.max(height) > SIDE_MAX {
        return Err(format!("it is {width}×{height}, and a side has at most {SIDE_MAX} pixels"));
    }
    *image = Pixels { height: height as usize, width: width as usize, channels: 3, data: decoded.into_raw() };
    Ok(())
}

/// Whether the last scan is followed by an end-of-image marker. The decoder would fill what is missing with grey and
/// call it a picture. Scan data cannot hold either marker by chance (0xFF is followed by 0 there), and a thumbnail's
/// markers come before the scan.
fn jpeg_is_whole(bytes: &[u8]) -> bool {
    let last = |marker: u8| bytes.windows(2).rposition(|pair| pair == [0xFF, marker]);
    matches!((last(0xDA), last(0xD9)), (Some(scan), Some(end)) if end > scan)
}

/// A PNG of RGB pixels.
pub(crate) fn encode_png(image: &Pixels) -> Vec<u8> {
    assert_eq!(image.channels, 3, "pictures are RGB");
    let mut bytes = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut bytes);
    let (width, height) = (image.width as u32, image.height as u32);
    image::ImageEncoder::write_image(encoder, &image.data, width, height, image::ExtendedColorType::Rgb8)
        .expect("a vector takes every byte");
    bytes
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gradient(height: usize, width: usize) -> Pixels {
        let data = (0..height * width * 3).map(|at| ((at / 3) % width * 255 / width) as u8).collect();
        Pixels { height, width, channels: 3, data }
    }

    pub(crate) fn jpeg(height: usize, width: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let image = gradient(height, width);
        image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, 95)
            .encode(&image.data, width as u32, height as u32, image::ExtendedColorType::Rgb8)
            .unwrap();
        bytes
    }

    #[test]
    fn a_png_comes_back_as_it_was() {
        let image = gradient(7, 9);
        let mut decoded = Pixels::default();
        decode_image(&encode_png(&image), &mut decoded).unwrap();
        assert_eq!(decoded, image);
    }

    #[test]
    fn a_jpeg_comes_back_nearly_as_it_was() {
        let mut decoded = Pixels::default();
        decode_image(&jpeg(40, 60), &mut decoded).unwrap();
        let image = gradient(40, 60);
        assert_eq!((decoded.height, decoded.width), (40, 60));
        assert!(decoded.data.iter().zip(&image.data).all(|(a, b)| a.abs_diff(*b) < 12));
    }

    #[test]
    fn a_file_cut_anywhere_is_damaged() {
        for whole in [jpeg(40, 60), encode_png(&gradient(40, 60))] {
            for keep in (0..whole.len() - 12).step_by(7) {
                assert!(decode_image(&whole[..keep], &mut Pixels::default()).is_err(), "{keep} of {}", whole.len());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn any_bytes_are_decoded_or_refused(
            noise in prop::collection::vec(any::<u8>(), 0..200), changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8),
        ) {
            let _ = decode_image(&noise, &mut Pixels::default());
            for mut bytes in [jpeg(16, 16), encode_png(&gradient(16, 16))] {
                for (place, value) in &changes {
                    let at = place.index(bytes.len());
                    bytes[at] = *value;
                }
                let _ = decode_image(&bytes, &mut Pixels::default());
            }
        }
    }
}
