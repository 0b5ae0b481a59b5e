//! A multi-layer perceptron: the smallest thing that learns, for first runs and tests.

use paceline_tensor::{GraphError, Value};

use super::{Entry, image};
use crate::net::Net;

pub(super) const MLP: Entry = Entry {
    name: "mlp",
    family: "mlp",
    native: image(32),
    smallest: 1,
    classes: 10,
    summary: "two hidden layers of 512",
    build,
};

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let mut x = net.flatten(x)?;
    for name in ["fc1", "fc2"] {
        x = net.linear(name, x, 512)?;
        x = net.relu(x)?;
    }
    net.linear("fc3", x, classes)
}
