//! GoogLeNet (Szegedy et al., 2014), layout and names of torchvision: batch normalisation everywhere, no auxiliary
//! heads, and 3×3 convolutions where the paper has 5×5 (a slip that torchvision's weights were trained with).

use paceline_tensor::{GraphError, Value};

use super::{Entry, image};
use crate::init::Init;
use crate::layer::{Conv, Norm, Window};
use crate::net::Net;

pub(super) const GOOGLENET: Entry = Entry {
    name: "googlenet",
    family: "inception",
    native: image(224),
    smallest: 31,
    classes: 1000,
    summary: "Szegedy et al. 2014, torchvision's layout, no auxiliary heads",
    build,
};

const NORM: Norm = Norm { epsilon: 1e-3, ..Norm::TORCH };
/// torchvision cuts this normal at ±2, which is 200 deviations.
const START: Init = Init::Normal(0.01);

/// Channels of an inception module's branches: 1×1, (down, 3×3), (down, second 3×3), after pooling.
type Module = (usize, [usize; 2], [usize; 2], usize);

/// The modules by name, and the window of the maximum before each, if any.
const MODULES: [(&str, Module, Option<usize>); 9] = [
    ("inception3a", (64, [96, 128], [16, 32], 32), Some(3)),
    ("inception3b", (128, [128, 192], [32, 96], 64), None),
    ("inception4a", (192, [96, 208], [16, 48], 64), Some(3)),
    ("inception4b", (160, [112, 224], [24, 64], 64), None),
    ("inception4c", (128, [128, 256], [24, 64], 64), None),
    ("inception4d", (112, [144, 288], [32, 64], 64), None),
    ("inception4e", (256, [160, 320], [32, 128], 128), None),
    ("inception5a", (256, [160, 320], [32, 128], 128), Some(2)),
    ("inception5b", (384, [192, 384], [48, 128], 128), None),
];

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = unit(net, "conv1", x, Conv::new(64, 7).stride(2).pad(3))?;
    let x = halve(net, x, 3)?;
    let x = unit(net, "conv2", x, Conv::new(64, 1))?;
    let mut x = unit(net, "conv3", x, Conv::new(192, 3).pad(1))?;
    for (name, channels, window) in MODULES {
        if let Some(window) = window {
            x = halve(net, x, window)?;
        }
        x = net.scope(name, |net| module(net, x, channels))?;
    }
    let x = net.global_average_pool(x)?;
    let x = net.dropout(x, 0.2)?;
    let fan_in = net.channels(x);
    net.linear_with("fc", x, classes, START, Some(Init::UniformFanIn { fan_in }))
}

fn module(net: &mut Net, x: Value, (one, three, third, pooled): Module) -> Result<Value, GraphError> {
    let branch1 = unit(net, "branch1", x, Conv::new(one, 1))?;
    let branch2 = unit(net, "branch2.0", x, Conv::new(three[0], 1))?;
    let branch2 = unit(net, "branch2.1", branch2, Conv::new(three[1], 3).pad(1))?;
    let branch3 = unit(net, "branch3.0", x, Conv::new(third[0], 1))?;
    let branch3 = unit(net, "branch3.1", branch3, Conv::new(third[1], 3).pad(1))?;
    let branch4 = net.max_pool(x, Window::new(3).stride(1).pad(1).ceil())?;
    let branch4 = unit(net, "branch4.1", branch4, Conv::new(pooled, 1))?;
    net.concat(&[branch1, branch2, branch3, branch4])
}

fn halve(net: &mut Net, x: Value, window: usize) -> Result<Value, GraphError> {
    net.max_pool(x, Window::new(window).stride(2).ceil())
}

fn unit(net: &mut Net, name: &str, x: Value, conv: Conv) -> Result<Value, GraphError> {
    let x = net.conv(&format!("{name}.conv"), x, conv.no_bias().init(START))?;
    let x = net.batch_norm_with(&format!("{name}.bn"), x, NORM)?;
    net.relu(x)
}
