//! LeNet-5 (LeCun et al., 1998) in today's dress: ReLU and maxima instead of tanh and trained averages.
//!
//! The paper's 32×32 input is a 28×28 digit with a border of two; here the border is the first layer's padding.

use paceline_tensor::{GraphError, Value};

use super::Entry;
use crate::layer::{Conv, Window};
use crate::net::{Input, Net};

pub(super) const LENET5: Entry = Entry {
    name: "lenet5",
    family: "lenet",
    native: Input::Image { size: [28, 28], channels: 1 },
    smallest: 12,
    classes: 10,
    summary: "LeCun et al. 1998, with ReLU and max pooling",
    build,
};

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = stage(net, "conv1", x, Conv::new(6, 5).pad(2))?;
    let x = stage(net, "conv2", x, Conv::new(16, 5))?;
    let x = net.flatten(x)?;
    let x = net.linear("fc1", x, 120)?;
    let x = net.relu(x)?;
    let x = net.linear("fc2", x, 84)?;
    let x = net.relu(x)?;
    net.linear("fc3", x, classes)
}

fn stage(net: &mut Net, name: &str, x: Value, conv: Conv) -> Result<Value, GraphError> {
    let x = net.conv(name, x, conv)?;
    let x = net.relu(x)?;
    net.max_pool(x, Window::new(2))
}
