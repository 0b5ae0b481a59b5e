//! Xception (Chollet, 2016), layout and names of Keras: residual blocks of separable convolutions.

use paceline_tensor::{GraphError, Value};

use super::{Entry, image, keras};
use crate::layer::{Conv, Norm, Window};
use crate::net::Net;

pub(super) const XCEPTION: Entry = Entry {
    name: "xception",
    family: "xception",
    native: image(299),
    smallest: 7,
    classes: 1000,
    summary: "Chollet 2016, Keras' layout",
    build,
};

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = norm(net, "block1_conv1", x, keras::conv(32, 3).stride(2))?;
    let x = net.relu(x)?;
    let x = norm(net, "block1_conv2", x, keras::conv(64, 3))?;
    let mut x = net.relu(x)?;
    for (name, channels) in [("block2", [128, 128]), ("block3", [256, 256]), ("block4", [728, 728])] {
        x = halving(net, name, x, channels)?;
    }
    for number in 5..=12 {
        let mut y = x;
        for part in 1..=3 {
            y = net.relu(y)?;
            y = separable(net, &format!("block{number}_sepconv{part}"), y, 728)?;
        }
        x = net.add(y, x)?;
    }
    x = halving(net, "block13", x, [728, 1024])?;
    for (name, channels) in [("block14_sepconv1", 1536), ("block14_sepconv2", 2048)] {
        x = separable(net, name, x, channels)?;
        x = net.relu(x)?;
    }
    let x = net.global_average_pool(x)?;
    keras::predictions(net, x, classes)
}

/// Two separable convolutions and a maximum beside a strided projection. Keras leaves the projection without a name;
/// here it is `name_residual`.
fn halving(net: &mut Net, name: &str, x: Value, channels: [usize; 2]) -> Result<Value, GraphError> {
    let residual = norm(net, &format!("{name}_residual"), x, keras::conv(channels[1], 1).stride(2).same())?;
    // The stem ends with an activation, so the first block does not begin with one.
    let y = if name == "block2" { x } else { net.relu(x)? };
    let y = separable(net, &format!("{name}_sepconv1"), y, channels[0])?;
    let y = net.relu(y)?;
    let y = separable(net, &format!("{name}_sepconv2"), y, channels[1])?;
    let y = net.max_pool(y, Window::new(3).stride(2).same())?;
    net.add(y, residual)
}

/// A 3×3 convolution of each channel by itself, a 1×1 convolution across them, a normalisation.
fn separable(net: &mut Net, name: &str, x: Value, channels: usize) -> Result<Value, GraphError> {
    let depth = net.channels(x);
    let x = net.conv(&format!("{name}.depthwise"), x, keras::conv(depth, 3).groups(depth).same())?;
    let x = net.conv(&format!("{name}.pointwise"), x, keras::conv(channels, 1))?;
    net.batch_norm_with(&format!("{name}_bn"), x, Norm::KERAS)
}

fn norm(net: &mut Net, name: &str, x: Value, conv: Conv) -> Result<Value, GraphError> {
    let x = net.conv(name, x, conv)?;
    net.batch_norm_with(&format!("{name}_bn"), x, Norm::KERAS)
}
