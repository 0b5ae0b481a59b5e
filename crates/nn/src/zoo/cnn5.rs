//! cnn5: five 3×3 convolutions with batch-norm and ReLU, halving the image three times. The default of `paceline train`:
//! small enough for a laptop core, good enough to see a network learn.

use paceline_tensor::{GraphError, Value};

use super::Entry;
use crate::init::Init;
use crate::layer::{Conv, Window};
use crate::net::Net;

pub(super) const CNN5: Entry = Entry {
    name: "cnn5",
    family: "cnn",
    native: super::image(32),
    smallest: 8,
    classes: 10,
    summary: "five 3×3 convolutions: the default of `paceline train`",
    build,
};

/// Channels of each layer, and whether the image is halved behind it.
const LAYERS: [(usize, bool); 5] = [(32, true), (64, true), (128, false), (128, true), (256, false)];

fn build(net: &mut Net, mut x: Value, classes: usize) -> Result<Value, GraphError> {
    for (index, (channels, halves)) in LAYERS.into_iter().enumerate() {
        let conv = Conv::new(channels, 3).pad(1).no_bias().init(Init::KaimingFanOut);
        x = net.conv(&format!("conv{}", index + 1), x, conv)?;
        x = net.batch_norm(&format!("bn{}", index + 1), x)?;
        x = net.relu(x)?;
        if halves {
            x = net.max_pool(x, Window::new(2))?;
        }
    }
    // A maximum, not a mean: a small shape anywhere in the image counts in full.
    let x = net.global_max_pool(x)?;
    net.linear("fc", x, classes)
}
