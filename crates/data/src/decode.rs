//! JPEG and PNG bytes to RGB pixels. Bytes come from anywhere: sizes are bounded, and a file that ends early is damaged.
//!
//! A decoder takes memory for the picture that a file announces before it has seen the picture. So what is announced is
//! held against two bounds first: what a run can want ([`DecodeLimits`]), and what so few bytes can be the compressed
//! form of. A header of 13,000 × 13,000 pixels over the data of a thumbnail costs nothing.

use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};

use crate::pixels::Pixels;

/// The longest side a picture may have.
const SIDE_MAX: u32 = 32_768;
/// A picture may have at least so many pixels, however small it is wanted: cameras and telephones make 12 to 60 million.
const PIXELS_MIN: u64 = 64 << 20;
/// No picture may have more: 512 MiB as RGB.
const PIXELS_MAX: u64 = (512 << 20) / 3;
/// Between the two, a side may be so many times as long as it will be: 1,600 pixels are then averaged to one.
const SHRINKING_MAX: u64 = 40;
/// For a PNG's colour profile, text and rows in decoding; the pixels are not counted.
const SIDE_DATA_BYTES_MAX: u64 = 16 << 20;
/// The most bytes that one byte of deflate stands for: a block's 258 repeated bytes in two bits.
const DEFLATE_RATIO_MAX: u64 = 1032;
/// The most pixels that one byte of a JPEG stands for. A block takes a bit at least, and the fewest blocks for an area
/// are eight for 32 × 32 pixels: two components, one sampled 4 times across, the other 4 times down.
const JPEG_PIXELS_PER_BYTE_MAX: u64 = 1024;

/// How large pictures may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    pixels: u64,
}

impl DecodeLimits {
    /// For pictures that will be brought to `side` pixels a side.
    pub fn for_side(side: usize) -> Self {
        let wanted = (side as u64).saturating_mul(SHRINKING_MAX).saturating_pow(2);
        Self { pixels: wanted.clamp(PIXELS_MIN, PIXELS_MAX) }
    }

    /// The longest file: as many bytes as the largest picture has as RGB.
    pub fn file_bytes(self) -> u64 {
        3 * self.pixels
    }

    /// Whether a picture of these sides, which takes so many bytes as it is decoded, is wanted.
    fn check(self, [width, height]: [u32; 2], decoded_bytes: u64) -> Result<(), String> {
        if width == 0 || height == 0 {
            return Err("it has no pixels".into());
        }
        if width.max(height) > SIDE_MAX {
            return Err(format!("it is {width}×{height}, and a side has at most {SIDE_MAX} pixels"));
        }
        let pixels = u64::from(width) * u64::from(height);
        // Four bytes a pixel: RGB, or RGB with transparency; of pictures with 16 bits a value half as many pixels.
        if pixels > self.pixels || decoded_bytes > 4 * self.pixels {
            let (found, most) = (pixels.div_ceil(1_000_000), self.pixels / 1_000_000);
            return Err(format!(
                "it has {width}×{height} pixels, {found} million; up to {most} million of 8 bits a channel are decoded \
                 for this --size, so make it smaller"
            ));
        }
        Ok(())
    }
}

/// Decodes one image to RGB.
///
/// # Errors
/// What is wrong with the bytes.
pub fn decode_image(bytes: &[u8], limits: DecodeLimits, image: &mut Pixels) -> Result<(), String> {
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
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut own = image::Limits::no_limits();
    own.max_alloc = Some(SIDE_DATA_BYTES_MAX);
    reader.limits(own);
    let decoder = reader.into_decoder().map_err(|error| error.to_string())?;
    let (width, height) = decoder.dimensions();
    limits.check([width, height], decoder.total_bytes())?;
    if !can_hold(bytes, format, [width, height]) {
        let length = bytes.len();
        return Err(format!("it announces {width}×{height} pixels, which its {length} bytes cannot hold"));
    }
    let decoded = DynamicImage::from_decoder(decoder).map_err(|error| error.to_string())?.into_rgb8();
    *image = Pixels { height: height as usize, width: width as usize, channels: 3, data: decoded.into_raw() };
    Ok(())
}

/// Whether so few bytes can be the compressed form of so many pixels.
fn can_hold(bytes: &[u8], format: ImageFormat, [width, height]: [u32; 2]) -> bool {
    let (length, width, height) = (bytes.len() as u64, u64::from(width), u64::from(height));
    if format == ImageFormat::Jpeg {
        return width * height <= length * JPEG_PIXELS_PER_BYTE_MAX;
    }
    // Bit depth and colour type stand behind the sides, in the chunk that every PNG begins with.
    let values = |kind: u8| match kind {
        2 => 3,
        4 => 2,
        6 => 4,
        _ => 1,
    };
    let bits = bytes.get(24..26).map_or(1, |header| u64::from(header[0]) * values(header[1]));
    height * (width * bits).div_ceil(8) <= length * DEFLATE_RATIO_MAX
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

    const LIMITS: DecodeLimits = DecodeLimits { pixels: 1 << 20 };

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
        decode_image(&encode_png(&image), LIMITS, &mut decoded).unwrap();
        assert_eq!(decoded, image);
    }

    #[test]
    fn a_jpeg_comes_back_nearly_as_it_was() {
        let mut decoded = Pixels::default();
        decode_image(&jpeg(40, 60), LIMITS, &mut decoded).unwrap();
        let image = gradient(40, 60);
        assert_eq!((decoded.height, decoded.width), (40, 60));
        assert!(decoded.data.iter().zip(&image.data).all(|(a, b)| a.abs_diff(*b) < 12));
    }

    /// The bytes with other sides in the header.
    pub(crate) fn with_sides(mut bytes: Vec<u8>, width: u16, height: u16) -> Vec<u8> {
        let (wide, high) = (width.to_be_bytes(), height.to_be_bytes());
        if bytes.starts_with(b"\x89PNG") {
            bytes[16..24].copy_from_slice(&[[0, 0], wide, [0, 0], high].concat());
            let sum = crc32(&bytes[12..29]).to_be_bytes();
            bytes[29..33].copy_from_slice(&sum);
        } else {
            let frame = bytes.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
            bytes[frame + 5..frame + 9].copy_from_slice(&[high, wide].concat());
        }
        bytes
    }

    /// The checksum of a PNG's chunks, bit by bit.
    fn crc32(bytes: &[u8]) -> u32 {
        let bit = |sum: u32| (sum >> 1) ^ if sum & 1 == 1 { 0xEDB8_8320 } else { 0 };
        !bytes.iter().fold(!0, |sum, &byte| (0..8).fold(sum ^ u32::from(byte), |sum, _| bit(sum)))
    }

    #[test]
    fn a_header_is_believed_only_as_far_as_the_bytes_go() {
        let all = DecodeLimits::for_side(8192);
        for whole in [jpeg(40, 40), encode_png(&gradient(40, 40))] {
            let said = |width, height, limits| {
                decode_image(&with_sides(whole.clone(), width, height), limits, &mut Pixels::default()).unwrap_err()
            };
            assert!(said(13_000, 13_000, all).contains("bytes cannot hold"), "{}", said(13_000, 13_000, all));
            assert!(said(1025, 1024, LIMITS).contains("1025×1024 pixels, 2 million; up to 1 million"));
            assert!(said(40_000, 1, all).contains("at most 32768"));
        }
    }

    #[test]
    fn pictures_that_compress_best_are_decoded() {
        let black = Pixels { height: 2048, width: 2048, channels: 3, data: vec![0; 2048 * 2048 * 3] };
        let mut jpeg = Vec::new();
        image::codecs::jpeg::JpegEncoder::new_with_quality(&mut jpeg, 1)
            .encode(&black.data, 2048, 2048, image::ExtendedColorType::Rgb8)
            .unwrap();
        for bytes in [jpeg, encode_png(&black)] {
            let mut decoded = Pixels::default();
            decode_image(&bytes, DecodeLimits::for_side(224), &mut decoded).unwrap();
            assert_eq!((decoded.height, decoded.width), (2048, 2048));
        }
    }

    #[test]
    fn limits_follow_the_side() {
        assert_eq!(DecodeLimits::for_side(32).pixels, PIXELS_MIN);
        assert_eq!(DecodeLimits::for_side(299).pixels, (40 * 299) * (40 * 299));
        assert_eq!(DecodeLimits::for_side(usize::MAX).pixels, PIXELS_MAX);
    }

    #[test]
    fn a_file_cut_anywhere_is_damaged() {
        for whole in [jpeg(40, 60), encode_png(&gradient(40, 60))] {
            for keep in (0..whole.len() - 12).step_by(7) {
                assert!(
                    decode_image(&whole[..keep], LIMITS, &mut Pixels::default()).is_err(),
                    "{keep} of {}",
                    whole.len()
                );
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn any_bytes_are_decoded_or_refused(
            noise in prop::collection::vec(any::<u8>(), 0..200), changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8),
        ) {
            let _ = decode_image(&noise, LIMITS, &mut Pixels::default());
            for mut bytes in [jpeg(16, 16), encode_png(&gradient(16, 16))] {
                for (place, value) in &changes {
                    let at = place.index(bytes.len());
                    bytes[at] = *value;
                }
                let _ = decode_image(&bytes, LIMITS, &mut Pixels::default());
            }
        }
    }
}
