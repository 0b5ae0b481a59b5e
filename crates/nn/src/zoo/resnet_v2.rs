//! ResNet v2 (He et al., 2016: normalise and activate before the convolution), layout and names of Keras.
//!
//! Keras' version halves the image in the *last* block of a stage, gives a bias to the convolutions that no
//! normalisation follows, and pads the first pooling with zeros that the maximum sees.

use paceline_tensor::window::Padding;
use paceline_tensor::{GraphError, Value};

use super::{Entry, image, keras};
use crate::layer::{Norm, Window};
use crate::net::Net;

pub(super) const RESNET50V2: Entry = entry("resnet50v2", |net, x, classes| resnet(net, x, classes, [3, 4, 6, 3]));
pub(super) const RESNET101V2: Entry = entry("resnet101v2", |net, x, classes| resnet(net, x, classes, [3, 4, 23, 3]));
pub(super) const RESNET152V2: Entry = entry("resnet152v2", |net, x, classes| resnet(net, x, classes, [3, 8, 36, 3]));

const NORM: Norm = Norm { epsilon: 1.001e-5, ..Norm::KERAS };

const fn entry(name: &'static str, build: fn(&mut Net, Value, usize) -> Result<Value, GraphError>) -> Entry {
    let summary = "He et al. 2016, Keras' layout";
    Entry { name, family: "resnet-v2", native: image(224), smallest: 1, classes: 1000, summary, build }
}

fn resnet(net: &mut Net, x: Value, classes: usize, blocks: [usize; 4]) -> Result<Value, GraphError> {
    let x = net.conv("conv1_conv", x, keras::conv_bias(64, 7).stride(2).pad(3))?;
    let x = net.zero_pad(x, Padding::all(1))?;
    let mut x = net.max_pool(x, Window::new(3).stride(2))?;
    for (stage, count) in blocks.into_iter().enumerate() {
        for number in 1..=count {
            let stride = if stage < 3 && number == count { 2 } else { 1 };
            let name = format!("conv{}_block{number}", stage + 2);
            x = block(net, &name, x, Block { channels: 64 << stage, stride, project: number == 1 })?;
        }
    }
    let x = norm_relu(net, "post_bn", x)?;
    let x = net.global_average_pool(x)?;
    keras::predictions(net, x, classes)
}

struct Block {
    channels: usize,
    stride: usize,
    /// Whether the shortcut is a convolution.
    project: bool,
}

fn block(net: &mut Net, name: &str, x: Value, block: Block) -> Result<Value, GraphError> {
    let Block { channels, stride, project } = block;
    let active = norm_relu(net, &format!("{name}_preact_bn"), x)?;
    let shortcut = if project {
        net.conv(&format!("{name}_0_conv"), active, keras::conv_bias(4 * channels, 1).stride(stride))?
    } else if stride > 1 {
        net.max_pool(x, Window::new(1).stride(stride))?
    } else {
        x
    };
    let y = net.conv(&format!("{name}_1_conv"), active, keras::conv(channels, 1))?;
    let y = norm_relu(net, &format!("{name}_1_bn"), y)?;
    let y = net.conv(&format!("{name}_2_conv"), y, keras::conv(channels, 3).stride(stride).pad(1))?;
    let y = norm_relu(net, &format!("{name}_2_bn"), y)?;
    let y = net.conv(&format!("{name}_3_conv"), y, keras::conv_bias(4 * channels, 1))?;
    net.add(y, shortcut)
}

fn norm_relu(net: &mut Net, name: &str, x: Value) -> Result<Value, GraphError> {
    let x = net.batch_norm_with(name, x, NORM)?;
    net.relu(x)
}
