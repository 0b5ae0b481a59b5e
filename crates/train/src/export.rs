//! A trained model as an ONNX file, which other programs run.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use paceline_nn::weights::{Inventory, Slot};
use paceline_nn::{Mode, Network, onnx};
use paceline_system::disk::Disk;

use crate::checkpoint::{Card, CheckedWeights};
use crate::error::TrainError;
use crate::registry::Registry;

/// The model that a weights file of a run describes, as the bytes of an ONNX file, and what the weights file says of itself.
///
/// # Errors
/// When the file is not whole, its model is unknown, or ONNX has no word for one of its operations.
pub fn to_onnx(disk: &Disk, weights: &Path, registry: &Registry) -> Result<(Card, Vec<u8>), TrainError> {
    let file = CheckedWeights::open(disk, weights)?;
    let card = file.card()?;
    let model = registry.find_model(&card.model)?;
    let network = Network::new(&model, Mode::Eval, 1, card.input()?, card.class_names.len(), 0.0)?;
    let inventory = Inventory { parameters: &network.parameters, states: &network.states };
    let loaded = file.read(inventory, &[])?;
    let values = |slot: Slot| {
        let found = match slot {
            Slot::Parameter(index) => &loaded.parameters[index],
            Slot::State(index) => &loaded.states[index],
        };
        Cow::Borrowed(found.as_deref().expect("a strict load leaves nothing out"))
    };
    let metadata = BTreeMap::from([
        ("model".to_owned(), card.model.clone()),
        ("classes".to_owned(), card.class_names.join("\n")),
        ("preprocess".to_owned(), serde_json::to_string(&card.preprocess).expect("operations are JSON")),
    ]);
    let bytes = onnx::export(&network, &values, &metadata).map_err(|error| TrainError::Refused(error.to_string()))?;
    Ok((card, bytes))
}
