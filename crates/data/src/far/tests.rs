//! What is lent is what is read in its place, bit for bit; and whatever comes is a listing or is refused.

use proptest::prelude::*;

use super::*;
use crate::dataset::Dataset;
use crate::decode::tests::jpeg;
use crate::pixels::Pixels;

/// A lender in the same process, some of whose answers are spoilt.
#[derive(Debug)]
struct Here {
    lender: Lender,
    spoilt: Option<Vec<u8>>,
}

impl Far for Here {
    fn listing(&self) -> Result<Listing, DataError> {
        let bytes = self.lender.listing()?.encode();
        Listing::decode(&bytes).map_err(DataError::refused)
    }

    fn read(&self, half: Split, number: usize, bytes_max: u64) -> Result<Result<Vec<u8>, String>, DataError> {
        match &self.spoilt {
            Some(bytes) => Ok(Ok(bytes.clone())),
            None => self.lender.read(half, number as u64, bytes_max),
        }
    }
}

fn write_set(folder: &Path) {
    for (half, count) in [("train", 4), ("val", 2)] {
        for (class, name) in ["ant", "bee"].iter().enumerate() {
            let place = folder.join(half).join(name);
            std::fs::create_dir_all(&place).unwrap();
            for number in 0..count {
                std::fs::write(place.join(format!("{number}.jpg")), jpeg(8 + class, 9 + number)).unwrap();
            }
        }
    }
    std::fs::write(folder.join("train/bee/2.jpg"), b"torn").unwrap();
}

fn halves(folder: &Path, spoilt: Option<Vec<u8>>, damaged_max: usize) -> [(Dataset, Dataset); 2] {
    let spec = Spec::Folder(Some(folder.to_owned()));
    let own = folder.to_owned();
    let elsewhere = Elsewhere::new(move |address| {
        assert_eq!(address, "there:1");
        let lender = Lender::open(&Spec::Folder(Some(own.clone())), &OpenOptions::default(), &Disk::real())?;
        Ok(Arc::new(Here { lender, spoilt: spoilt.clone() }))
    });
    let options = OpenOptions { elsewhere, damaged_max, ..OpenOptions::default() };
    let open = |spec: &Spec| Dataset::open(spec, &options, &Disk::real()).unwrap();
    [open(&spec), open(&"remote:there:1".parse().unwrap())]
}

#[test]
fn what_is_lent_is_what_is_read_in_its_place() {
    let folder = tempfile::tempdir().unwrap();
    write_set(folder.path());
    let [(train, val), (far_train, far_val)] = halves(folder.path(), None, 1);
    assert_eq!((train.info(), val.info()), (far_train.info(), far_val.info()));
    let (mut here, mut there) = (Pixels::default(), Pixels::default());
    for (near, far) in [(&train, &far_train), (&val, &far_val)] {
        for sample in 0..near.len() {
            let labels = [near.read_image(sample, &mut here).unwrap(), far.read_image(sample, &mut there).unwrap()];
            assert!(labels[0] == labels[1] && here == there, "sample {sample}");
        }
    }
    let named = |set: &Dataset| set.damaged().iter().map(|damage| damage.file.clone()).collect::<Vec<_>>();
    assert_eq!(named(&far_train), [PathBuf::from("train/bee/2.jpg")]);
    assert_eq!(named(&train), [folder.path().join("train/bee/2.jpg")]);
}

#[test]
fn what_is_no_image_is_damaged_wherever_it_comes_from() {
    let folder = tempfile::tempdir().unwrap();
    write_set(folder.path());
    let [_, (train, _)] = halves(folder.path(), Some(b"anything".to_vec()), 0);
    let error = train.read_image(0, &mut Pixels::default()).unwrap_err().to_string();
    assert!(error.contains("train/ant/0.jpg is damaged") && error.contains("--damaged-max 1"), "{error}");
}

#[test]
fn a_program_without_connections_says_so() {
    let spec = "remote:there:1".parse().unwrap();
    let error = Dataset::open(&spec, &OpenOptions::default(), &Disk::real()).unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("type --data folder:DIR"), "{error}");
    let lent = Lender::open(&Spec::Shapes, &OpenOptions::default(), &Disk::real()).unwrap_err();
    assert!(lent.to_string().contains("data serve folder:DIR"), "{lent}");
}

#[test]
fn a_listing_that_makes_no_sense_is_refused() {
    let sound = Listing {
        name: "set".into(),
        class_names: vec!["a".into(), "b".into()],
        train: vec![(0, "1.jpg".into()), (1, "2.jpg".into())],
        val: vec![(1, "1.jpg".into())],
    };
    assert_eq!(Listing::decode(&sound.encode()), Ok(sound.clone()));
    let spoil = |change: fn(&mut Listing)| {
        let mut listing = sound.clone();
        change(&mut listing);
        Listing::decode(&listing.encode()).unwrap_err()
    };
    assert!(spoil(|listing| listing.class_names.clear()).contains("0 classes"));
    assert!(spoil(|listing| listing.val.clear()).contains("0 files in val"));
    assert!(spoil(|listing| listing.train[1].0 = 2).contains("class 2, of which there are 2"));
    assert!(spoil(|listing| listing.train[1].1 = "x".repeat(2000)).contains("a name"));
    assert!(spoil(|listing| listing.class_names[0] = "x".repeat(5 << 20)).contains("classes"));
    assert!(Listing::decode(b"{}").is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_a_listing_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Listing::decode(&bytes);
    }
}
