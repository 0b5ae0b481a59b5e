//! What a program brings to Paceline under names of its own: models and data. They are then found wherever the names of the zoo and of the
//! built-in sets are.

use std::borrow::Cow;

use paceline_data::outline::{Outline, outline};
use paceline_data::{DataError, Dataset, OpenOptions, OwnData, Spec};
use paceline_nn::Model;
use paceline_nn::models::{Listing, Models, Named};
use paceline_system::disk::Disk;

use crate::error::TrainError;

/// Models and data by name: those that everybody has, and those of one program. A value: it is handed to a run or to the command line.
///
/// ```
/// use paceline_data::OwnData;
/// use paceline_nn::Net;
/// use paceline_tensor::{GraphError, Value};
/// use paceline_train::Registry;
///
/// fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
///     let x = net.flatten(x)?;
///     net.linear("fc", x, classes)
/// }
///
/// let halves = ((vec![0, 255], vec![0, 1]), (vec![255], vec![1]));
/// let registry = Registry::new().model("mine", model).data("dots", OwnData::images([1, 1, 1], halves.0, halves.1));
/// registry.check()?;
/// assert_eq!(registry.find_model("mine")?.name, "mine");
/// assert!(Registry::new().model("resnet50", model).check().is_err(), "the zoo has one");
/// # Ok::<(), paceline_train::TrainError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Registry {
    models: Models,
    data: Vec<(String, OwnData)>,
    /// What was wrong with a name, so that a chain of calls need not stop for it.
    problem: Option<String>,
}

impl Registry {
    /// The zoo and the built-in sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model: `config.model` and `--model` find it by this name.
    pub fn model(self, name: &str, model: impl Model + Send + Sync + 'static) -> Self {
        self.listed_model(name, model, Listing::default())
    }

    /// As [`Registry::model`], for a model that `models`, `plan` and `bench` show at another input than 32×32×3 and 10 classes. Training
    /// follows the data.
    pub fn listed_model(mut self, name: &str, model: impl Model + Send + Sync + 'static, listing: Listing) -> Self {
        let added = check_name("model", name).and_then(|()| self.models.add(name, model, listing));
        self.remember(added);
        self
    }

    /// Adds data: `config.data` and `--data` find them by this name.
    pub fn data(mut self, name: &str, data: OwnData) -> Self {
        let added = check_name("data", name).and_then(|()| {
            if Spec::NAMES.contains(&name) {
                return Err(format!("a built-in set is called `{name}` already; give yours another name"));
            }
            if self.data.iter().any(|(other, _)| other == name) {
                return Err(format!("two sets of this program are called `{name}`; give one another name"));
            }
            self.data.push((name.to_owned(), data));
            Ok(())
        });
        self.remember(added);
        self
    }

    fn remember(&mut self, added: Result<(), String>) {
        self.problem = self.problem.take().or(added.err());
    }

    /// Whether every name stands for one thing.
    ///
    /// # Errors
    /// When one does not; runs and commands ask before they begin.
    pub fn check(&self) -> Result<(), TrainError> {
        self.problem.as_ref().map_or(Ok(()), |problem| Err(TrainError::Refused(problem.clone())))
    }

    /// All models.
    pub fn models(&self) -> &Models {
        &self.models
    }

    /// The model of a name.
    ///
    /// # Errors
    /// When there is none; the sentence proposes names that are spelled nearly so.
    pub fn find_model(&self, name: &str) -> Result<Named<'_>, TrainError> {
        self.models.find(name).map_err(|error| TrainError::Refused(error.to_string()))
    }

    /// The program's own data of a name, if there are any.
    pub fn find_data(&self, name: &str) -> Option<&OwnData> {
        self.data.iter().find(|(own, _)| own == name).map(|(_, data)| data)
    }

    /// The sets of the program itself, by name.
    pub fn data_names(&self) -> impl Iterator<Item = &str> {
        self.data.iter().map(|(name, _)| name.as_str())
    }

    /// Opens both halves of the data that `text` names.
    ///
    /// # Errors
    /// When there are none, or they are not what they should be.
    pub fn open_data(&self, text: &str, options: &OpenOptions, disk: &Disk) -> Result<(Dataset, Dataset), TrainError> {
        match self.find_data(text) {
            Some(data) => Ok(Dataset::open_own(text, data)?),
            None => Ok(Dataset::open(&self.parse(text)?, options, disk)?),
        }
    }

    /// What can be told of data without opening them; nothing where that is for whoever opens them to say.
    pub fn outline(&self, text: &str, options: &OpenOptions, disk: &Disk) -> Option<Outline> {
        match self.find_data(text) {
            Some(data) => data.outline(text).ok(),
            None => outline(&text.parse().ok()?, options, disk),
        }
    }

    /// A spec of data that are not the program's own.
    ///
    /// # Errors
    /// When no data are called so; the sentence names the program's own too.
    pub fn parse(&self, text: &str) -> Result<Spec, TrainError> {
        let name: Cow<'_, str> = text.split_once(':').map_or(text.into(), |(name, _)| name.to_owned().into());
        text.parse().map_err(|error: DataError| match self.data.is_empty() || Spec::NAMES.contains(&&*name) {
            true => error.into(),
            false => {
                let own: Vec<&str> = self.data_names().collect();
                TrainError::Refused(format!("{error}; or, of this program: {}", own.join(", ")))
            }
        })
    }

    /// Tells apart what two processes bring under the same name of data; empty for data that everybody has.
    pub fn fingerprint(&self, text: &str) -> String {
        self.find_data(text).map_or(String::new(), |data| format!("samples = {:016x}\n", data.fingerprint()))
    }
}

/// Names stand in files, flags and folders' names.
fn check_name(what: &str, name: &str) -> Result<(), String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let fits = (1..=64).contains(&name.len()) && name.bytes().all(plain) && name.as_bytes()[0].is_ascii_alphanumeric();
    if fits {
        return Ok(());
    }
    let name = paceline_system::printable::printable(name);
    Err(format!("{what} cannot be called `{name}`: a name is 1 to 64 letters, digits, -, _ and . of ASCII"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_nn::Net;
    use paceline_tensor::{GraphError, Value};

    fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        let x = net.flatten(x)?;
        net.linear("fc", x, classes)
    }

    fn dots() -> OwnData {
        OwnData::images([1, 1, 1], (vec![0, 255], vec![0, 1]), (vec![255], vec![1]))
    }

    #[test]
    fn names_are_checked_against_those_that_there_are() {
        for (registry, words) in [
            (Registry::new().model("resnet50", model), "of the zoo"),
            (Registry::new().model("a", model).model("a", model), "two models"),
            (Registry::new().data("shapes", dots()), "built-in set"),
            (Registry::new().data("a", dots()).data("a", dots()), "two sets"),
            (Registry::new().data("a:b", dots()), "cannot be called `a:b`"),
            (Registry::new().model("", model), "cannot be called ``"),
        ] {
            let error = registry.check().unwrap_err();
            assert!(error.is_refusal() && error.to_string().contains(words), "{error}");
        }
        assert!(Registry::new().model("a", model).data("a", dots()).check().is_ok());
    }

    #[test]
    fn own_data_are_opened_by_name_and_offered_where_a_name_is_unknown() {
        let registry = Registry::new().data("dots", dots());
        let open = |text| registry.open_data(text, &OpenOptions::default(), &Disk::real());
        let (train, val) = open("dots").unwrap();
        assert_eq!((train.len(), val.len(), train.info().name.as_str()), (2, 1, "dots"));
        let outline = registry.outline("dots", &OpenOptions::default(), &Disk::real()).unwrap();
        assert_eq!(outline.held_bytes, train.held_bytes() + val.held_bytes());
        assert!(open("dot").unwrap_err().to_string().contains("or, of this program: dots"));
        assert!(!open("text").unwrap_err().to_string().contains("dots"));
        assert!(open("synthetic:4x4x1/2/8").is_ok());
        assert!(registry.fingerprint("shapes").is_empty() && registry.fingerprint("dots").starts_with("samples = "));
    }
}
