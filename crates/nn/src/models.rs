//! Models by name: those of the zoo, and those that a program brings itself.
//!
//! A value, carried to whoever looks a model up: two runs in one process may know different models.

use std::fmt;
use std::sync::Arc;

use paceline_tensor::{GraphError, Value};

use crate::net::{Input, Model, Net};
use crate::zoo::{self, Entry, UnknownModel};

/// The family of models that a program brings.
const OWN: &str = "own";

/// A model that was found by its name, with what lists say of it.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// The name a user types.
    pub name: &'a str,
    /// The family it belongs to; `own` for a program's own.
    pub family: &'a str,
    /// The input at which it is listed, planned and measured.
    pub native: Input,
    /// The smallest image side (or sequence) for which the arithmetic is defined.
    pub smallest: usize,
    /// The class count at which it is listed.
    pub classes: usize,
    /// One line for lists.
    pub summary: &'a str,
    model: &'a dyn Model,
}

impl Named<'_> {
    /// Whether the program brought it: it is then trained at the data's own size, whatever it is listed at.
    pub fn is_own(&self) -> bool {
        self.family == OWN
    }
}

impl Model for Named<'_> {
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        self.model.build(net, x, classes)
    }
}

impl From<&'static Entry> for Named<'_> {
    fn from(entry: &'static Entry) -> Self {
        let Entry { name, family, native, smallest, classes, summary, .. } = *entry;
        Self { name, family, native, smallest, classes, summary, model: entry }
    }
}

impl fmt::Debug for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Named({})", self.name)
    }
}

/// At what a program's own model is listed, planned and measured where nothing else is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// One sample.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
    /// One line for lists.
    pub summary: String,
}

impl Default for Listing {
    fn default() -> Self {
        let input = Input::Image { size: [32, 32], channels: 3 };
        Self { input, classes: 10, summary: "of this program".into() }
    }
}

#[derive(Clone)]
struct Own {
    name: String,
    model: Arc<dyn Model + Send + Sync>,
    listing: Listing,
}

/// The models that a command can name.
///
/// ```
/// use paceline_nn::models::{Listing, Models};
/// use paceline_nn::Net;
/// use paceline_tensor::{GraphError, Value};
///
/// fn mine(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
///     let x = net.flatten(x)?;
///     net.linear("fc", x, classes)
/// }
///
/// let mut models = Models::default();
/// models.add("mine", mine, Listing::default())?;
/// assert!(models.find("mine")?.is_own() && !models.find("lenet5")?.is_own());
/// assert!(models.add("lenet5", mine, Listing::default()).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct Models {
    own: Vec<Own>,
}

impl Models {
    /// Adds a model of one's own.
    ///
    /// # Errors
    /// When another model has the name; the sentence says so.
    pub fn add(
        &mut self,
        name: &str,
        model: impl Model + Send + Sync + 'static,
        listing: Listing,
    ) -> Result<(), String> {
        if zoo::find(name).is_ok() {
            return Err(format!("a model of the zoo is called `{name}` already; give yours another name"));
        }
        if self.own.iter().any(|own| own.name == name) {
            return Err(format!("two models of this program are called `{name}`; give one another name"));
        }
        self.own.push(Own { name: name.to_owned(), model: Arc::new(model), listing });
        Ok(())
    }

    /// Every model: the program's own first, then the zoo.
    pub fn all(&self) -> impl Iterator<Item = Named<'_>> {
        self.own.iter().map(named).chain(zoo::all().iter().map(Named::from))
    }

    /// The model of this name.
    ///
    /// # Errors
    /// When there is none; the sentence proposes names that are spelled nearly so.
    pub fn find(&self, name: &str) -> Result<Named<'_>, UnknownModel> {
        let found = self.all().find(|model| model.name == name);
        found.ok_or_else(|| UnknownModel::among(name, self.all().map(|model| model.name)))
    }
}

fn named(own: &Own) -> Named<'_> {
    let Own { name, model, listing: Listing { input, classes, summary } } = own;
    Named { name, family: OWN, native: *input, smallest: 1, classes: *classes, summary, model: &**model }
}

impl fmt::Debug for Models {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.own.iter().map(|own| &own.name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mine(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        let x = net.flatten(x)?;
        net.linear("fc", x, classes)
    }

    #[test]
    fn own_models_are_found_beside_the_zoo() {
        let mut models = Models::default();
        models.add("minet", mine, Listing::default()).unwrap();
        assert_eq!(models.all().count(), zoo::all().len() + 1);
        assert!(models.find("minet").unwrap().is_own());
        let sentence = models.find("minett").unwrap_err().to_string();
        assert!(sentence.contains("did you mean `minet`"), "{sentence}");
    }

    #[test]
    fn a_name_stands_for_one_model() {
        let mut models = Models::default();
        models.add("mine", mine, Listing::default()).unwrap();
        assert!(models.add("mine", mine, Listing::default()).unwrap_err().contains("two models"));
        assert!(models.add("resnet50", mine, Listing::default()).unwrap_err().contains("of the zoo"));
    }
}
