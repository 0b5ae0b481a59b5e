//! Two residual networks made for 32×32 images.

use paceline_tensor::{GraphError, Value};

use super::resnet::{basic, conv, stages};
use super::{Entry, image};
use crate::init::Init;
use crate::layer::Window;
use crate::net::Net;

/// The network of Page's "How to train your ResNet" (2018): nine layers that reach 94% on CIFAR-10 in minutes.
pub(super) const RESNET9: Entry = Entry {
    name: "resnet9",
    family: "resnet-cifar",
    native: image(32),
    smallest: 8,
    classes: 10,
    summary: "Page 2018: fast on CIFAR-10",
    build: resnet9,
};

/// He et al. (2015), section 4.2, with 1×1 convolutions as shortcuts where the shape changes (their option B).
pub(super) const RESNET20: Entry = Entry {
    name: "resnet20",
    family: "resnet-cifar",
    native: image(32),
    smallest: 1,
    classes: 10,
    summary: "He et al. 2015 for CIFAR-10, projection shortcuts",
    build: resnet20,
};

fn resnet20(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = unit(net, "conv1", "bn1", x, 16)?;
    let x = stages(net, x, basic, &[3, 3, 3], 16)?;
    let x = net.global_average_pool(x)?;
    net.linear("fc", x, classes)
}

fn resnet9(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let mut x = unit(net, "prep.conv", "prep.bn", x, 64)?;
    for (stage, channels, residual) in [("layer1", 128, true), ("layer2", 256, false), ("layer3", 512, true)] {
        x = net.scope(stage, |net| {
            let x = unit(net, "conv", "bn", x, channels)?;
            let x = net.max_pool(x, Window::new(2))?;
            if !residual {
                return Ok(x);
            }
            let y = unit(net, "res1.conv", "res1.bn", x, channels)?;
            let y = unit(net, "res2.conv", "res2.bn", y, channels)?;
            net.add(y, x)
        })?;
    }
    let x = net.global_max_pool(x)?;
    let fan_in = net.channels(x);
    let x = net.linear_with("fc", x, classes, Init::UniformFanIn { fan_in }, None)?;
    // Page's temperature: the logits of a net without a bias grow too fast otherwise.
    net.scale(x, 0.125)
}

/// 3×3 convolution, batch normalisation, ReLU.
fn unit(net: &mut Net, conv_name: &str, norm_name: &str, x: Value, channels: usize) -> Result<Value, GraphError> {
    let x = net.conv(conv_name, x, conv(channels, 3).pad(1))?;
    let x = net.batch_norm(norm_name, x)?;
    net.relu(x)
}
