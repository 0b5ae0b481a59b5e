//! A folder of photographs: `train/CLASS/*.jpg|jpeg|png` and `val/CLASS/…`. Classes are the folders' names, sorted.
//!
//! Images are decoded when they are asked for. A damaged one is named, counted and replaced by the next sound image of
//! the list, which is often of the same class: batches keep their size, and since being damaged is a property of the
//! file and not of the moment, the replacement is the same in every run. Above the user's limit the run is refused.
//! A link to nothing and a file that may not be read are damaged too; what is no file is refused when the set is opened.
//! The files may lie on another machine ([`crate::far`]): then only their bytes come from there, and all else is the same.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use paceline_system::disk::{Disk, Kind};
use paceline_system::printable::{Shown, printable};
use serde::{Serialize, Serializer};

use crate::DataError;
use crate::dataset::{self, Info, OpenOptions, SampleKind, Source, Split};
use crate::decode::{DecodeLimits, decode_image};
use crate::far::Far;
use crate::pixels::Pixels;

/// The size that networks for photographs are customarily trained at.
pub(crate) const SIDE: usize = 224;

/// A file that could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Which half it is in.
    pub split: Split,
    /// The file.
    #[serde(serialize_with = "as_text")]
    pub file: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// A path may hold bytes that are not text, and JSON may not.
fn as_text<S: Serializer>(path: &Path, target: S) -> Result<S::Ok, S::Error> {
    target.serialize_str(&path.to_string_lossy())
}

/// Where the files are.
#[derive(Clone, Debug)]
enum Home {
    Here(Disk),
    Far(Arc<dyn Far>),
}

/// One half of a folder of photographs.
#[derive(Debug)]
pub struct Folder {
    info: Info,
    home: Home,
    files: Vec<(PathBuf, u32)>,
    limits: DecodeLimits,
    damaged_max: usize,
    /// The damaged files of both halves: the limit is on their sum.
    damaged: Arc<Mutex<BTreeMap<PathBuf, Damage>>>,
}

impl Folder {
    /// Lists both halves. No image is opened.
    ///
    /// # Errors
    /// When a half is missing or empty, or they disagree on the classes.
    pub fn open(place: Option<&Path>, options: &OpenOptions, disk: &Disk) -> Result<(Self, Self), DataError> {
        let home = options.data_home.as_deref();
        let has = |folder: &Path| disk.is_dir(&folder.join("train")) && disk.is_dir(&folder.join("val"));
        let folder = dataset::find(place, home, &[], has)
            .ok_or_else(|| dataset::missing("folder", place, home, "train/CLASS/*.jpg and val/CLASS/*.jpg"))?;
        let name = folder.file_name().map_or_else(|| "folder".into(), |name| name.to_string_lossy().into_owned());
        let listed = |split: Split| list(&folder.join(split.name()), disk);
        let home = Home::Here(disk.clone());
        let (train, val) = Self::halves((&name, &home), options, [listed(Split::Train)?, listed(Split::Val)?]);
        if train.info.class_names != val.info.class_names {
            let odd = |one: &Self, other: &Self| {
                one.info.class_names.iter().find(|name| !other.info.class_names.contains(name)).cloned()
            };
            let (name, here, there) = match odd(&train, &val) {
                Some(name) => (name, "train", "val"),
                None => (odd(&val, &train).unwrap_or_default(), "val", "train"),
            };
            return Err(DataError::refused(format!(
                "class '{}' is in {here} but not in {there} of {}; both need the same classes",
                printable(&name),
                Shown(&folder)
            )));
        }
        Ok((train, val))
    }

    /// Both halves of what somebody else has.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn open_far(far: Arc<dyn Far>, options: &OpenOptions) -> Result<(Self, Self), DataError> {
        let listing = far.listing()?;
        let listed = |split| (listing.class_names.clone(), listing.files(split));
        Ok(Self::halves((&listing.name, &Home::Far(far)), options, [listed(Split::Train), listed(Split::Val)]))
    }

    /// Both halves as they are listed: they share the count of damaged files.
    fn halves((name, home): (&str, &Home), options: &OpenOptions, [train, val]: [Listed; 2]) -> (Self, Self) {
        let damaged = Arc::new(Mutex::new(BTreeMap::new()));
        let half = |split, (class_names, files): Listed| Self {
            info: Info {
                source: Source::Folder,
                name: name.to_owned(),
                split,
                len: files.len(),
                kind: SampleKind::Image { height: SIDE, width: SIDE, channels: 3 },
                classes: class_names.len(),
                class_names,
                // Of ImageNet's training images: what published weights for photographs expect.
                mean: vec![0.485, 0.456, 0.406],
                std: vec![0.229, 0.224, 0.225],
            },
            home: home.clone(),
            files,
            limits: DecodeLimits::for_side(options.size.unwrap_or(SIDE)),
            damaged_max: options.damaged_max,
            damaged: Arc::clone(&damaged),
        };
        (half(Split::Train, train), half(Split::Val, val))
    }

    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    pub(crate) fn label(&self, sample: usize) -> i32 {
        self.files[sample].1 as i32
    }

    pub(crate) fn read(&self, sample: usize, image: &mut Pixels) -> Result<i32, DataError> {
        assert!(sample < self.files.len(), "sample {sample} of {}", self.files.len());
        for other in (sample..self.files.len()).chain(0..sample) {
            let file = &self.files[other].0;
            if self.lock().contains_key(file) {
                continue;
            }
            match self.decode(other, image)? {
                Ok(()) => return Ok(self.label(other)),
                Err(problem) => self.count(file, problem)?,
            }
        }
        Err(DataError::refused(format!("every image of {} is damaged", printable(&self.info.name))))
    }

    /// Decodes one image without replacement or limit: for looking a set over.
    pub(crate) fn try_read(&self, sample: usize, image: &mut Pixels) -> Result<Result<i32, Damage>, DataError> {
        let file = &self.files[sample].0;
        let damage = |problem| Damage { split: self.info.split, file: file.clone(), problem };
        Ok(self.decode(sample, image)?.map(|()| self.label(sample)).map_err(damage))
    }

    /// Reads and decodes a file: inside, what is wrong with it; outside, what is wrong with the disk or the way to it.
    fn decode(&self, number: usize, image: &mut Pixels) -> Result<Result<(), String>, DataError> {
        let bytes = self.encoded(number, self.limits.file_bytes())?;
        Ok(bytes.and_then(|bytes| decode_image(&bytes, self.limits, image)))
    }

    /// A file's bytes, as [`Folder::decode`] has them.
    pub(crate) fn encoded(&self, number: usize, bytes_max: u64) -> Result<Result<Vec<u8>, String>, DataError> {
        match &self.home {
            Home::Far(far) => far.read(self.info.split, number, bytes_max),
            Home::Here(disk) => match disk.read_within(&self.files[number].0, bytes_max) {
                Ok(bytes) => Ok(Ok(bytes)),
                Err(error) => error.of_the_file().map_or(Err(error.into()), |problem| Ok(Err(problem))),
            },
        }
    }

    /// All files with their classes.
    pub(crate) fn files(&self) -> &[(PathBuf, u32)] {
        &self.files
    }

    /// The damaged files of this half met so far.
    pub(crate) fn damaged(&self) -> Vec<Damage> {
        self.lock().values().filter(|damage| damage.split == self.info.split).cloned().collect()
    }

    fn count(&self, file: &Path, problem: String) -> Result<(), DataError> {
        let mut damaged = self.lock();
        let damage = Damage { split: self.info.split, file: file.to_owned(), problem: problem.clone() };
        damaged.insert(file.to_owned(), damage);
        let (count, allowed) = (damaged.len(), self.damaged_max);
        if count <= allowed {
            Ok(())
        } else {
            Err(DataError::Damaged { file: file.to_owned(), problem, count, allowed })
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, Damage>> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The class names of one half, and its files with their classes.
type Listed = (Vec<String>, Vec<(PathBuf, u32)>);

fn list(half: &Path, disk: &Disk) -> Result<Listed, DataError> {
    let visible = |path: &Path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let is_image = |path: &Path| {
        let end = path.extension().map(|end| end.to_string_lossy().to_lowercase());
        matches!(end.as_deref(), Some("jpg" | "jpeg" | "png"))
    };
    let (mut names, mut files) = (Vec::new(), Vec::new());
    for (folder, _) in disk.list_kinds(half)?.into_iter().filter(|(path, kind)| *kind == Kind::Folder && visible(path))
    {
        let before = files.len();
        for (file, kind) in disk.list_kinds(&folder)?.into_iter().filter(|(path, _)| visible(path) && is_image(path)) {
            let other = match kind {
                Kind::File => {
                    files.push((file, names.len() as u32));
                    continue;
                }
                Kind::Folder => "a folder",
                Kind::Other(name) => name,
            };
            return Err(DataError::refused(format!(
                "{} is {other}, not an image; remove it, or give it a name that does not end like an image's",
                Shown(&file)
            )));
        }
        if files.len() == before {
            return Err(DataError::refused(format!(
                "{} has no .jpg, .jpeg or .png; add some or remove it",
                Shown(&folder)
            )));
        }
        names.push(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    if names.is_empty() {
        return Err(DataError::refused(format!(
            "{} holds no class folders; it needs CLASS/*.jpg or *.png",
            Shown(half)
        )));
    }
    Ok((names, files))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::tests::jpeg;

    /// Three classes of three images each; sizes tell them apart.
    fn write_set(folder: &Path) {
        for half in ["train", "val"] {
            for (class, name) in ["ant", "bee", "cow"].iter().enumerate() {
                let place = folder.join(half).join(name);
                std::fs::create_dir_all(&place).unwrap();
                for number in 0..3 {
                    std::fs::write(place.join(format!("{number}.jpg")), jpeg(8 + class, 8 + number)).unwrap();
                }
                std::fs::write(place.join("notes.txt"), "not an image").unwrap();
            }
        }
    }

    fn open(folder: &Path, damaged_max: usize) -> Result<(Folder, Folder), DataError> {
        Folder::open(Some(folder), &OpenOptions { damaged_max, ..OpenOptions::default() }, &Disk::real())
    }

    #[test]
    fn classes_are_the_folders_in_order() {
        let folder = tempfile::tempdir().unwrap();
        write_set(folder.path());
        let (train, val) = open(folder.path(), 0).unwrap();
        assert_eq!(train.info.class_names, ["ant", "bee", "cow"]);
        assert_eq!((train.info.len, val.info.len), (9, 9));
        let mut image = Pixels::default();
        for sample in 0..9 {
            assert_eq!(train.read(sample, &mut image).unwrap(), (sample / 3) as i32);
            assert_eq!((image.height, image.width), (8 + sample / 3, 8 + sample % 3));
        }
    }

    #[test]
    fn a_damaged_image_is_refused_by_name_and_with_what_to_type() {
        let folder = tempfile::tempdir().unwrap();
        write_set(folder.path());
        std::fs::write(folder.path().join("train/bee/1.jpg"), b"\xFF\xD8\xFF garbage").unwrap();
        let (train, _) = open(folder.path(), 0).unwrap();
        let error = train.read(4, &mut Pixels::default()).unwrap_err().to_string();
        assert!(error.contains("bee/1.jpg") && error.contains("type --damaged-max 1"), "{error}");
    }

    #[test]
    fn allowed_damage_is_counted_once_and_replaced_the_same_way_every_time() {
        let folder = tempfile::tempdir().unwrap();
        write_set(folder.path());
        for name in ["train/cow/1.jpg", "train/cow/2.jpg"] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        let (train, val) = open(folder.path(), 2).unwrap();
        let mut image = Pixels::default();
        for _ in 0..3 {
            // Sample 7 and its successor are damaged: the list begins anew.
            assert_eq!(train.read(7, &mut image).unwrap(), 0);
            assert_eq!((image.height, image.width), (8, 8));
        }
        let damaged: Vec<_> = train.damaged().into_iter().map(|damage| damage.file).collect();
        assert_eq!(damaged, ["train/cow/1.jpg", "train/cow/2.jpg"].map(|name| folder.path().join(name)));
        assert!(val.damaged().is_empty());
        // The limit is on both halves together.
        std::fs::write(folder.path().join("val/ant/0.jpg"), b"").unwrap();
        assert!(val.read(0, &mut image).unwrap_err().to_string().contains("3 damaged so far, 2 allowed"));
    }

    #[test]
    fn a_link_to_nothing_is_damaged_and_what_is_no_file_is_refused() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        write_set(folder.path());
        symlink("nothing", folder.path().join("train/ant/4.png")).unwrap();
        symlink("5.png", folder.path().join("train/ant/5.png")).unwrap();
        let (train, _) = open(folder.path(), 2).unwrap();
        assert_eq!(train.read(3, &mut Pixels::default()).unwrap(), 1, "the next sound one is of the next class");
        let problems: Vec<_> = train.damaged().into_iter().map(|damage| damage.problem).collect();
        assert!(problems[0] == "it is a link to nothing" && problems[1].contains("symbolic links"), "{problems:?}");
        symlink("/dev/zero", folder.path().join("val/cow/zero.jpg")).unwrap();
        assert!(open(folder.path(), 9).unwrap_err().to_string().contains("zero.jpg is a device, not an image"));
    }

    #[test]
    fn halves_must_agree_and_be_there() {
        let folder = tempfile::tempdir().unwrap();
        write_set(folder.path());
        std::fs::create_dir(folder.path().join("val/dog")).unwrap();
        assert!(open(folder.path(), 0).unwrap_err().to_string().contains("dog has no .jpg"));
        std::fs::write(folder.path().join("val/dog/1.png"), b"x").unwrap();
        assert!(open(folder.path(), 0).unwrap_err().to_string().contains("class 'dog' is in val but not in train"));
        std::fs::remove_dir_all(folder.path().join("val")).unwrap();
        assert!(open(folder.path(), 0).unwrap_err().to_string().contains("type --data folder:DIR"));
    }
}
