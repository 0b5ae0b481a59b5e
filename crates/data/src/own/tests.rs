//! What a program brings is read as any other set, or refused with its number.

use super::*;
use crate::augment::{Augment, AugmentChoice, Op};
use crate::dataset::Dataset;
use crate::order::Shard;
use crate::{Batch, Loader, LoaderOptions};
use paceline_system::clock::Clock;

/// Sixteen images of 2×2 grey pixels in four classes, four for evaluation.
fn four() -> OwnData {
    let half = |count: usize| {
        let pixels = (0..count).flat_map(|image| [0, 60, 120, 15 * image as u8]).collect();
        (pixels, (0..count).map(|image| image % 4).collect())
    };
    OwnData::images([2, 2, 1], half(16), half(4))
}

fn batches(set: Own, shard: Shard, from: usize) -> Vec<Batch> {
    let augment = Augment::training(AugmentChoice::Standard, set.info(), None).unwrap();
    let options = LoaderOptions { shard, ..LoaderOptions::training(4, 7) };
    let mut loader = Loader::new(Arc::new(Dataset::Own(set)), augment, options, Clock::real()).unwrap();
    loader.epoch(3, from).map(Result::unwrap).collect()
}

#[test]
fn images_have_the_mean_and_deviation_of_their_training_half() {
    let (train, val) = four().class_names(["a", "b", "c", "d"]).open("four").unwrap();
    let bytes: Vec<f64> = (0..16).flat_map(|image| [0.0, 60.0, 120.0, 15.0 * f64::from(image)]).collect();
    let mean = bytes.iter().sum::<f64>() / 64.0 / 255.0;
    let deviation = (bytes.iter().map(|byte| (byte / 255.0 - mean).powi(2)).sum::<f64>() / 64.0).sqrt();
    assert!((f64::from(train.info().mean[0]) - mean).abs() < 1e-6);
    assert!((f64::from(train.info().std[0]) - deviation).abs() < 1e-6);
    assert_eq!((val.info().len, &val.info().mean), (4, &train.info().mean));
    assert_eq!(train.info().class_names[3], "d");
    assert_eq!(train.held_bytes(), 64 + 16 * size_of::<usize>());
    assert_eq!(four().outline("four").unwrap().held_bytes, train.held_bytes() + val.held_bytes());
}

#[test]
fn shards_and_resumed_epochs_see_the_samples_of_the_whole() {
    let data = four().augment(1, true);
    let open = || data.open("four").unwrap().0;
    let whole = batches(open(), Shard::WHOLE, 0);
    assert_eq!(whole.len(), 4);
    assert_eq!(batches(open(), Shard::WHOLE, 2), whole[2..]);
    let shares = [0, 1].map(|rank| batches(open(), Shard { rank, world: 2 }, 0));
    for (step, batch) in whole.iter().enumerate() {
        let mut both: Vec<usize> = shares.iter().flat_map(|share| share[step].samples.clone()).collect();
        let mut all = batch.samples.clone();
        both.sort_unstable();
        all.sort_unstable();
        assert_eq!(both, all);
    }
}

#[test]
fn augmentation_is_what_the_set_asks_for() {
    let ops = |data: OwnData, choice| Augment::training(choice, data.open("x").unwrap().0.info(), None).unwrap();
    let list = |augment: &Augment| augment.ops()[..augment.ops().len() - 1].to_vec();
    assert!(list(&ops(four(), AugmentChoice::Standard)).is_empty());
    let own = four().augment(1, true);
    let standard = list(&ops(own.clone(), AugmentChoice::Standard));
    assert_eq!(standard, [Op::RandomCrop { pad: 1 }, Op::HorizontalFlip]);
    assert!(list(&ops(own.clone(), AugmentChoice::None)).is_empty());
    assert_eq!(list(&ops(own, AugmentChoice::Strong)).len(), 3);
}

#[test]
fn numbers_are_taken_as_they_are_or_normalised() {
    let half = || (vec![-3.0, 5.0, 1e6, 0.25], vec![1, 0]);
    let data = OwnData::values([1, 2, 1], half(), half());
    let read = |data: &OwnData| {
        let set = data.open("numbers").unwrap().1;
        let augment = Augment::evaluation(AugmentChoice::Standard, set.info(), None).unwrap();
        let loader = Loader::new(Arc::new(Dataset::Own(set)), augment, LoaderOptions::evaluation(2), Clock::real());
        loader.unwrap().epoch(0, 0).next().unwrap().unwrap()
    };
    assert_eq!(read(&data).images, [-3.0, 5.0, 1e6, 0.25]);
    assert_eq!(read(&data).targets, [1, 0]);
    assert_eq!(read(&data.clone().normalise([1.0], [2.0])).images, [-2.0, 2.0, 499_999.5, -0.375]);
}

#[test]
fn tokens_come_in_windows_with_what_follows() {
    let (train, val) = OwnData::tokens(3, 8, vec![0, 1, 2, 3, 4, 5, 6, 7], vec![7, 6, 5, 4]).open("count").unwrap();
    assert_eq!((train.info().len, val.info().len), (2, 1));
    let (mut tokens, mut targets) = (vec![0; 3], vec![0; 3]);
    train.read_tokens(1, &mut tokens, &mut targets).unwrap();
    assert_eq!((tokens, targets), (vec![3, 4, 5], vec![4, 5, 6]));
}

#[test]
fn what_does_not_go_together_is_refused() {
    let labels = |count| (0..count).map(|image| image % 2).collect::<Vec<usize>>();
    let images = |bytes, count| OwnData::images([2, 2, 1], (vec![0; bytes], labels(count)), (vec![0; 8], labels(2)));
    for (data, words) in [
        (images(0, 0), "no sample for training"),
        (images(8, 2).class_names(["one"]), "2 classes have 1 names"),
        (images(8, 2).normalise([0.5, 0.5], [1.0, 1.0]), "has 1 channels"),
        (images(7, 2), "sample 1 of x (train) cannot be used: it has 3 values, and 2×2×1 are 4"),
        (images(9, 2), "it has 5 values"),
        (OwnData::images([2, 0, 1], (vec![], vec![0]), (vec![], vec![0])), "images of 2×0×1 cannot be"),
        (OwnData::tokens(0, 5, vec![1; 9], vec![1; 9]), "sequences of 0 tokens"),
    ] {
        let error = data.open("x").unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn code_that_panics_or_gives_nonsense_is_named_and_not_ours() {
    struct Broken(usize);
    impl Samples for Broken {
        fn len(&self) -> usize {
            3
        }
        fn sample(&self, index: usize) -> Sample<'_> {
            assert!(index != 1, "no such file");
            Sample::Image { pixels: vec![0; 4].into(), label: if index == 2 { self.0 } else { 0 } }
        }
    }
    let kind = SampleKind::Image { height: 2, width: 2, channels: 1 };
    let data = OwnData::new(kind, 2, Broken(5), Broken(5)).normalise([0.5], [0.5]);
    let (train, _) = data.open("broken").unwrap();
    let mut image = Pixels::default();
    assert_eq!(train.read(0, &mut image).unwrap(), 0);
    let said = |sample| train.read(sample, &mut Pixels::default()).unwrap_err().to_string();
    assert!(
        said(1).contains("sample 1 of broken (train)") && said(1).contains("panicked: no such file"),
        "{}",
        said(1)
    );
    assert!(said(2).contains("is 5, and there are 2"), "{}", said(2));
}

#[test]
fn other_data_has_another_fingerprint() {
    let other = OwnData::images([2, 2, 1], (vec![1; 64], vec![3; 16]), (vec![0; 16], vec![0; 4]));
    assert_eq!(four().fingerprint(), four().fingerprint());
    assert_ne!(four().fingerprint(), other.fingerprint());
}

struct Panics;

impl Samples for Panics {
    fn len(&self) -> usize {
        2
    }

    fn sample(&self, _: usize) -> Sample<'_> {
        panic!("no such file")
    }
}

#[test]
fn code_that_panics_for_the_first_sample_is_named_before_anything_begins() {
    let data = OwnData::new(SampleKind::Image { height: 1, width: 1, channels: 1 }, 2, Panics, Panics);
    data.fingerprint();
    let error = data.open("broken").unwrap_err().to_string();
    assert!(error.contains("broken") && error.contains("the program panicked: no such file"), "{error}");
}
