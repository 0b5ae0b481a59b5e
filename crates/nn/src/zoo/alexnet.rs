//! AlexNet as torchvision has it: the single-tower version of "One weird trick" (Krizhevsky, 2014).

use paceline_tensor::{GraphError, Value};

use super::{Entry, image};
use crate::layer::{Conv, Window};
use crate::net::Net;

pub(super) const ALEXNET: Entry = Entry {
    name: "alexnet",
    family: "alexnet",
    native: image(224),
    smallest: 63,
    classes: 1000,
    summary: "Krizhevsky 2014, torchvision's layout",
    build,
};

/// Number in the list of features, the convolution, and whether a pooling follows.
const FEATURES: [(usize, Conv, bool); 5] = [
    (0, Conv::new(64, 11).stride(4).pad(2), true),
    (3, Conv::new(192, 5).pad(2), true),
    (6, Conv::new(384, 3).pad(1), false),
    (8, Conv::new(256, 3).pad(1), false),
    (10, Conv::new(256, 3).pad(1), true),
];

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let mut x = x;
    for (number, conv, pooled) in FEATURES {
        x = net.conv(&format!("features.{number}"), x, conv)?;
        x = net.relu(x)?;
        if pooled {
            x = net.max_pool(x, Window::new(3).stride(2))?;
        }
    }
    x = net.adaptive_average_pool(x, [6, 6])?;
    x = net.flatten(x)?;
    for name in ["classifier.1", "classifier.4"] {
        x = net.dropout(x, 0.5)?;
        x = net.linear(name, x, 4096)?;
        x = net.relu(x)?;
    }
    net.linear("classifier.6", x, classes)
}
