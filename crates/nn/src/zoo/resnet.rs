//! ResNet (He et al., 2015); layout, state-dict names and starts of torchvision, which puts a bottleneck's stride on
//! its 3×3 convolution ("v1.5"). The CIFAR variant in `cifar.rs` is made of the same basic blocks.

use paceline_tensor::{GraphError, Value};

use super::{Entry, image};
use crate::init::Init;
use crate::layer::{Conv, Window};
use crate::net::Net;

pub(super) const RESNET18: Entry = entry("resnet18", |net, x, classes| resnet(net, x, classes, basic, [2, 2, 2, 2]));
pub(super) const RESNET34: Entry = entry("resnet34", |net, x, classes| resnet(net, x, classes, basic, [3, 4, 6, 3]));
pub(super) const RESNET50: Entry =
    entry("resnet50", |net, x, classes| resnet(net, x, classes, bottleneck, [3, 4, 6, 3]));
pub(super) const RESNET101: Entry =
    entry("resnet101", |net, x, classes| resnet(net, x, classes, bottleneck, [3, 4, 23, 3]));
pub(super) const RESNET152: Entry =
    entry("resnet152", |net, x, classes| resnet(net, x, classes, bottleneck, [3, 8, 36, 3]));

const fn entry(name: &'static str, build: fn(&mut Net, Value, usize) -> Result<Value, GraphError>) -> Entry {
    let summary = "He et al. 2015, torchvision's layout";
    Entry { name, family: "resnet", native: image(224), smallest: 1, classes: 1000, summary, build }
}

/// A residual block: (net, x, channels inside, stride).
type Block = fn(&mut Net, Value, usize, usize) -> Result<Value, GraphError>;

fn resnet(net: &mut Net, x: Value, classes: usize, block: Block, blocks: [usize; 4]) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, conv(64, 7).stride(2).pad(3))?;
    let x = net.batch_norm("bn1", x)?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(3).stride(2).pad(1))?;
    let x = stages(net, x, block, &blocks, 64)?;
    let x = net.global_average_pool(x)?;
    net.linear("fc", x, classes)
}

/// The stages `layer1`, `layer2`, …: each doubles the channels, and all but the first halve the image.
pub(super) fn stages(
    net: &mut Net,
    x: Value,
    block: Block,
    blocks: &[usize],
    width: usize,
) -> Result<Value, GraphError> {
    let mut x = x;
    for (stage, &count) in blocks.iter().enumerate() {
        for number in 0..count {
            let stride = if stage > 0 && number == 0 { 2 } else { 1 };
            x = net.scope(format!("layer{}.{number}", stage + 1), |net| block(net, x, width << stage, stride))?;
        }
    }
    Ok(x)
}

/// Two 3×3 convolutions.
pub(super) fn basic(net: &mut Net, x: Value, channels: usize, stride: usize) -> Result<Value, GraphError> {
    let y = net.conv("conv1", x, conv(channels, 3).stride(stride).pad(1))?;
    let y = net.batch_norm("bn1", y)?;
    let y = net.relu(y)?;
    let y = net.conv("conv2", y, conv(channels, 3).pad(1))?;
    let y = net.batch_norm("bn2", y)?;
    join(net, x, y, stride)
}

/// 1×1 down, 3×3, 1×1 up to four times the channels.
fn bottleneck(net: &mut Net, x: Value, channels: usize, stride: usize) -> Result<Value, GraphError> {
    let y = net.conv("conv1", x, conv(channels, 1))?;
    let y = net.batch_norm("bn1", y)?;
    let y = net.relu(y)?;
    let y = net.conv("conv2", y, conv(channels, 3).stride(stride).pad(1))?;
    let y = net.batch_norm("bn2", y)?;
    let y = net.relu(y)?;
    let y = net.conv("conv3", y, conv(4 * channels, 1))?;
    let y = net.batch_norm("bn3", y)?;
    join(net, x, y, stride)
}

/// Adds the shortcut: x itself, or its 1×1 projection where the shape changes.
fn join(net: &mut Net, x: Value, y: Value, stride: usize) -> Result<Value, GraphError> {
    let channels = net.channels(y);
    let shortcut = if stride == 1 && net.channels(x) == channels {
        x
    } else {
        let x = net.conv("downsample.0", x, conv(channels, 1).stride(stride))?;
        net.batch_norm("downsample.1", x)?
    };
    let sum = net.add(y, shortcut)?;
    net.relu(sum)
}

pub(super) const fn conv(channels: usize, kernel: usize) -> Conv {
    Conv::new(channels, kernel).no_bias().init(Init::KaimingFanOut)
}
