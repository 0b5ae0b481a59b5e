//! Augmentation: the same image, seed, epoch and sample give the same numbers; the pictures stay pictures.

use super::*;

const PLAIN: fn() -> Op = || Op::Normalise { mean: vec![0.0; 3], std: vec![1.0; 3] };

fn numbered(height: usize, width: usize) -> Pixels {
    Pixels { height, width, channels: 3, data: (0..height * width * 3).map(|at| (at % 251) as u8).collect() }
}

fn apply(ops: Vec<Op>, image: &Pixels, key: SampleKey) -> Vec<f32> {
    let augment = Augment::new(ops).unwrap();
    let kind = SampleKind::Image { height: image.height, width: image.width, channels: 3 };
    let mut out = vec![f32::NAN; augment.output(kind).unwrap().iter().product()];
    let mut scratch = Scratch { image: image.clone(), ..Scratch::default() };
    augment.apply(&mut scratch, key, &mut out);
    out
}

fn key(epoch: u64, sample: usize) -> SampleKey {
    SampleKey { seed: 5, epoch, sample }
}

#[test]
fn choices_are_a_function_of_seed_epoch_and_sample() {
    let image = numbered(32, 32);
    let ops = || vec![Op::RandomCrop { pad: 4 }, Op::HorizontalFlip, PLAIN()];
    assert_eq!(apply(ops(), &image, key(1, 7)), apply(ops(), &image, key(1, 7)));
    let versions: Vec<_> = (0..40).map(|at| apply(ops(), &image, key(at / 8, at as usize % 8))).collect();
    let distinct = (1..40).filter(|&at| versions[..at].iter().all(|earlier| *earlier != versions[at])).count();
    assert!(distinct > 30, "{distinct} of 39 differ from all earlier ones");
}

#[test]
fn normalise_is_the_textbook_formula() {
    let image = Pixels { height: 1, width: 2, channels: 3, data: vec![0, 255, 51, 102, 1, 254] };
    let (mean, std) = (vec![0.5, 0.25, 0.1], vec![0.5, 0.2, 0.3]);
    let out = apply(vec![Op::Normalise { mean: mean.clone(), std: std.clone() }], &image, key(0, 0));
    for (at, value) in out.iter().enumerate() {
        let expected = (f32::from(image.data[at]) / 255.0 - mean[at % 3]) / std[at % 3];
        assert_eq!(value.to_bits(), expected.to_bits());
    }
}

#[test]
fn random_crops_reach_every_corner_and_stay_within_the_padding() {
    let mut image = Pixels::default();
    image.reshape(9, 9, 3);
    image.data[(4 * 9 + 4) * 3] = 255;
    let mut places = std::collections::BTreeSet::new();
    for sample in 0..2000 {
        let out = apply(vec![Op::RandomCrop { pad: 2 }, PLAIN()], &image, key(0, sample));
        let at = out.iter().position(|&value| value == 1.0).expect("the dot is never cropped away") / 3;
        places.insert((at / 9, at % 9));
    }
    let expected = (2..=6).flat_map(|row| (2..=6).map(move |column| (row, column))).collect();
    assert_eq!(places, expected);
}

#[test]
fn half_of_the_images_are_flipped() {
    let image = numbered(2, 4);
    let straight = apply(vec![PLAIN()], &image, key(0, 0));
    let ops = || vec![Op::HorizontalFlip, PLAIN()];
    let flipped = (0..1000).filter(|&sample| apply(ops(), &image, key(0, sample)) != straight).count();
    assert!((430..570).contains(&flipped), "{flipped}");
}

#[test]
fn a_centre_crop_takes_the_middle_and_pads_small_images() {
    let image = Pixels { height: 1, width: 5, channels: 3, data: (0..15).collect() };
    let out = apply(vec![Op::CentreCrop { height: 1, width: 3 }, PLAIN()], &image, key(0, 0));
    assert_eq!(out[0], 3.0 / 255.0);
    let out = apply(vec![Op::CentreCrop { height: 3, width: 5 }, PLAIN()], &image, key(0, 0));
    assert_eq!((out[1], out[16], out[31]), (0.0, 1.0 / 255.0, 0.0));
}

#[test]
fn a_random_resized_crop_works_on_any_image() {
    for (height, width) in [(1, 1), (1, 300), (300, 1), (224, 224), (50, 90)] {
        for sample in 0..50 {
            let crop = Op::RandomResizedCrop { height: 8, width: 8, scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0] };
            let out = apply(vec![crop, PLAIN()], &numbered(height, width), key(0, sample));
            assert!(out.iter().all(|value| (0.0..=1.0).contains(value)));
        }
    }
}

#[test]
fn the_shorter_side_of_a_strip_is_resized_without_a_huge_image() {
    for (height, width) in [(1, 32_768), (32_768, 1)] {
        let mut strip = Pixels::default();
        strip.reshape(height, width, 3);
        // The middle two pixels: the only ones that the crop shows.
        strip.data[16_383 * 3..16_385 * 3].fill(255);
        let ops = vec![Op::ResizeShorter { side: 256 }, Op::CentreCrop { height: 224, width: 224 }, PLAIN()];
        let augment = Augment::new(ops).unwrap();
        let mut scratch = Scratch { image: strip, ..Scratch::default() };
        let mut out = vec![f32::NAN; 224 * 224 * 3];
        augment.apply(&mut scratch, key(0, 0), &mut out);
        assert!(out.iter().all(|&value| value > 0.5), "{out:?}");
        assert!(scratch.image.data.capacity().max(scratch.next.data.capacity()) < 1 << 20);
    }
    assert_eq!(shorter_to(100, 250, 50), [50, 125], "an ordinary picture keeps its shape");
}

#[test]
fn random_windows_have_the_asked_area_and_ratio() {
    let mut random = Random::new(&[1]);
    for _ in 0..500 {
        let window = random_window(200, 300, [0.2, 0.5], [0.75, 4.0 / 3.0], &mut random);
        let part = (window.height * window.width) as f32 / 60_000.0;
        let aspect = window.width as f32 / window.height as f32;
        assert!((0.195..=0.505).contains(&part) && (0.74..=1.35).contains(&aspect), "{window:?}");
        assert!(window.top as usize + window.height <= 200 && window.left as usize + window.width <= 300);
    }
}

/// A set of each source of images.
fn sets() -> [Info; 5] {
    let info = |source, [height, width, channels]: [usize; 3]| Info {
        source,
        name: "set".into(),
        split: crate::dataset::Split::Train,
        len: 1,
        kind: SampleKind::Image { height, width, channels },
        classes: 1,
        class_names: vec!["a".into()],
        mean: vec![0.5; channels],
        std: vec![0.5; channels],
    };
    [
        info(Source::Cifar10, [32, 32, 3]),
        info(Source::Shapes, [32, 32, 3]),
        info(Source::Mnist, [28, 28, 1]),
        info(Source::Folder, [224, 224, 3]),
        info(Source::Synthetic, [20, 30, 4]),
    ]
}

#[test]
fn presets_bring_every_set_to_the_asked_size() {
    let sets = sets();
    for info in &sets {
        let SampleKind::Image { height, width, channels } = info.kind else { panic!("an image") };
        for (size, expected) in
            [(None, [height, width, channels]), (Some(128), [128, 128, channels]), (Some(1), [1, 1, channels])]
        {
            let evaluation = Augment::evaluation(AugmentChoice::Standard, info, size).unwrap();
            let training = Augment::training(AugmentChoice::Standard, info, size).unwrap();
            for augment in [evaluation, training] {
                assert_eq!(augment.output(info.kind), Some(expected), "{:?}", augment.ops());
                let mut scratch = Scratch::default();
                scratch.image.reshape(height, width, channels);
                augment.apply(&mut scratch, key(0, 0), &mut vec![0.0; expected.iter().product()]);
                assert!(info.source != Source::Folder || augment.fixes_size());
            }
        }
        assert!(
            Augment::evaluation(AugmentChoice::Standard, info, Some(0))
                .unwrap_err()
                .to_string()
                .contains("type --size")
        );
    }
    let mirrors =
        |info| Augment::training(AugmentChoice::Standard, info, None).unwrap().ops().contains(&Op::HorizontalFlip);
    assert_eq!(sets.each_ref().map(mirrors), [true, true, false, true, false], "a mirrored digit is another sign");
}

#[test]
fn flip_sees_all_of_an_image_in_training_and_in_evaluation() {
    for info in &sets() {
        let training = Augment::training(AugmentChoice::Flip, info, Some(12)).unwrap();
        let evaluation = Augment::evaluation(AugmentChoice::Flip, info, Some(12)).unwrap();
        let normalise = Op::Normalise { mean: info.mean.clone(), std: info.std.clone() };
        let resize = Op::Resize { height: 12, width: 12 };
        assert_eq!(evaluation.ops(), [resize.clone(), normalise.clone()], "{}", info.name);
        assert_eq!(training.ops(), [resize, Op::HorizontalFlip, normalise], "{}", info.name);
        assert!(training.fixes_size() && evaluation.fixes_size());
    }
    // A wide picture: what stands at its edges is still there, and half of the pictures are mirrored.
    let image = numbered(20, 50);
    let ops = |choice: fn(&Info) -> Augment| choice(&sets()[3]).ops().to_vec();
    let seen = apply(ops(|info| Augment::evaluation(AugmentChoice::Flip, info, Some(16)).unwrap()), &image, key(0, 0));
    let mirrored: Vec<f32> =
        seen.chunks(16 * 3).flat_map(|row| row.chunks(3).rev().flatten().copied().collect::<Vec<_>>()).collect();
    let training = ops(|info| Augment::training(AugmentChoice::Flip, info, Some(16)).unwrap());
    let mut turned = 0;
    for sample in 0..200 {
        let out = apply(training.clone(), &image, key(0, sample));
        turned += usize::from(out == mirrored);
        assert!(out == seen || out == mirrored, "nothing but a mirror image is made of it");
    }
    assert!((60..140).contains(&turned), "{turned} of 200");
}

#[test]
fn nonsense_is_refused() {
    assert!(Augment::new(vec![]).is_err());
    assert!(Augment::new(vec![PLAIN(), PLAIN()]).is_err());
    assert!(Augment::new(vec![Op::Resize { height: 0, width: 3 }, PLAIN()]).is_err());
    assert!(Augment::new(vec![Op::Normalise { mean: vec![0.0], std: vec![0.0] }]).is_err());
}

#[test]
fn a_view_says_what_applying_does() {
    let (image, kind) = (numbered(9, 7), SampleKind::Image { height: 9, width: 7, channels: 3 });
    let normalise = || Op::Normalise { mean: vec![0.4, 0.5, 0.6], std: vec![0.2; 3] };
    for ops in [
        vec![normalise()],
        vec![Op::RandomCrop { pad: 3 }, normalise()],
        vec![Op::HorizontalFlip, Op::Cutout { side: 4 }, normalise()],
        vec![Op::RandomCrop { pad: 3 }, Op::HorizontalFlip, Op::Cutout { side: 3 }, normalise()],
        vec![Op::ReflectedCrop { pad: 6 }, Op::AlternatingFlip, Op::Cutout { side: 3 }, normalise()],
    ] {
        let augment = Augment::new(ops.clone()).unwrap();
        assert!(augment.is_view() && augment.output(kind) == Some([9, 7, 3]));
        for sample in 0..200 {
            let key = key(2, sample);
            let [_, top, left, mirrored, first_row, first_column, last_row, last_column] =
                augment.view([9, 7], key).words();
            let value = |(row, column, channel): (i32, i32, usize)| {
                let hole = (first_row..last_row).contains(&row) && (first_column..last_column).contains(&column);
                let mut at = (row + top, if mirrored & 1 == 1 { 6 - column } else { column } + left);
                if mirrored & 2 == 2 {
                    let reflect = |at: i32, last: i32| last - (last - at.abs()).abs();
                    at = (reflect(at.0, 8), reflect(at.1, 6));
                }
                let inside = (0..9).contains(&at.0) && (0..7).contains(&at.1);
                let byte = match (hole, inside) {
                    (true, _) => augment.hole()[channel],
                    (false, true) => image.data[((at.0 * 7 + at.1) * 3) as usize + channel],
                    (false, false) => 0,
                };
                augment.tables()[channel][usize::from(byte)]
            };
            let pixels = (0..9).flat_map(|row| (0..7).map(move |column| (row, column)));
            let looked: Vec<f32> =
                pixels.flat_map(|(row, column)| (0..3).map(move |channel| (row, column, channel))).map(value).collect();
            assert_eq!(looked, apply(ops.clone(), &image, key), "{ops:?}, sample {sample}");
        }
    }
    let resized = Augment::new(vec![Op::HorizontalFlip, Op::Resize { height: 4, width: 4 }, normalise()]).unwrap();
    assert!(!resized.is_view());
    let twice = Augment::new(vec![Op::RandomCrop { pad: 1 }, Op::RandomCrop { pad: 1 }, normalise()]).unwrap();
    assert!(!twice.is_view(), "what the first crop left out would be seen by the second");
}

#[test]
fn an_alternating_image_is_mirrored_in_every_other_epoch() {
    let image = numbered(3, 4);
    let seen = |epoch, sample| apply(vec![Op::AlternatingFlip, PLAIN()], &image, key(epoch, sample));
    let first: Vec<_> = (0..32).map(|sample| seen(0, sample)).collect();
    assert!(first.iter().any(|image| *image != first[0]), "not all begin alike");
    for (sample, first) in first.iter().enumerate() {
        assert!(seen(1, sample) != *first && seen(2, sample) == *first && seen(3, sample) == seen(1, sample));
    }
}

#[test]
fn a_hole_is_a_square_of_the_mean_colour() {
    let mut image = Pixels::default();
    image.reshape(8, 8, 3);
    let ops = vec![Op::Cutout { side: 3 }, Op::Normalise { mean: vec![0.2; 3], std: vec![1.0; 3] }];
    let mut areas = std::collections::BTreeSet::new();
    for sample in 0..500 {
        let out = apply(ops.clone(), &image, key(0, sample));
        areas.insert(out.iter().filter(|value| value.abs() < 1e-3).count() / 3);
    }
    assert_eq!(areas.into_iter().collect::<Vec<_>>(), [4, 6, 9], "whole, cut by an edge, cut by a corner");
}
