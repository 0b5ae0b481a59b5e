//! MobileNet (Howard et al., 2017) at full width, layout and names of Keras: depthwise and pointwise convolutions with
//! ReLU6, and a convolution as classifier.

use paceline_tensor::window::Padding;
use paceline_tensor::{GraphError, Unary, Value};

use super::{Entry, image, keras};
use crate::layer::{Conv, Norm};
use crate::net::Net;

pub(super) const MOBILENET: Entry = Entry {
    name: "mobilenet",
    family: "mobilenet",
    native: image(224),
    smallest: 31,
    classes: 1000,
    summary: "Howard et al. 2017, Keras' layout",
    build,
};

/// Channels and stride of each block.
const BLOCKS: [(usize, usize); 13] = [
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (1024, 2),
    (1024, 1),
];

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let mut x = unit(net, "conv1", x, keras::conv(32, 3).stride(2).same())?;
    for (number, (channels, stride)) in (1..).zip(BLOCKS) {
        let depth = net.channels(x);
        // At stride 2 Keras puts its zeros below and right whatever the size, which "same" does for even sizes only.
        let padding = Padding { top: 2 - stride, left: 2 - stride, bottom: 1, right: 1 };
        let depthwise = keras::conv(depth, 3).stride(stride).groups(depth).padding(padding);
        x = unit(net, &format!("conv_dw_{number}"), x, depthwise)?;
        x = unit(net, &format!("conv_pw_{number}"), x, keras::conv(channels, 1))?;
    }
    let x = net.adaptive_average_pool(x, [1, 1])?;
    let x = net.dropout(x, 1e-3)?;
    let x = net.conv("conv_preds", x, keras::conv_bias(classes, 1))?;
    let batch = net.shape(x)[0];
    net.reshape(x, [batch, classes])
}

fn unit(net: &mut Net, name: &str, x: Value, conv: Conv) -> Result<Value, GraphError> {
    let x = net.conv(name, x, conv)?;
    let x = net.batch_norm_with(&format!("{name}_bn"), x, Norm::KERAS)?;
    net.unary(x, Unary::Relu6)
}
