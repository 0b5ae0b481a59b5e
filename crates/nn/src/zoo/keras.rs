//! What the models with Keras' layout share: Glorot's uniform weights, zero biases, no bias before a normalisation.

use paceline_tensor::{GraphError, Value};

use crate::init::Init;
use crate::layer::{Conv, Norm};
use crate::net::Net;

/// Inception's normalisation: Keras' defaults without a learned scale, since ReLU and a convolution follow.
const UNSCALED: Norm = Norm { scale: false, ..Norm::KERAS };

/// A convolution without bias.
pub(super) const fn conv(channels: usize, kernel: usize) -> Conv {
    rectangular(channels, [kernel, kernel])
}

/// A convolution without bias and with a kernel of (height, width).
pub(super) const fn rectangular(channels: usize, kernel: [usize; 2]) -> Conv {
    Conv::rectangular(channels, kernel).no_bias().init(Init::GlorotUniform)
}

/// A convolution with a bias that starts at zero.
pub(super) const fn conv_bias(channels: usize, kernel: usize) -> Conv {
    Conv::new(channels, kernel).init(Init::GlorotUniform).bias_init(Init::Constant(0.0))
}

/// The layer that Keras calls `predictions`.
pub(super) fn predictions(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    net.linear_with("predictions", x, classes, Init::GlorotUniform, Some(Init::Constant(0.0)))
}

/// Inception's unit: `name.conv`, the normalisation `name.bn`, ReLU.
pub(super) fn unit(net: &mut Net, name: &str, x: Value, conv: Conv) -> Result<Value, GraphError> {
    let x = net.conv(&format!("{name}.conv"), x, conv)?;
    let x = net.batch_norm_with(&format!("{name}.bn"), x, UNSCALED)?;
    net.relu(x)
}

/// A chain of units `name.0`, `name.1`, …
pub(super) fn chain(net: &mut Net, name: &str, x: Value, convs: &[Conv]) -> Result<Value, GraphError> {
    convs.iter().enumerate().try_fold(x, |x, (number, &conv)| unit(net, &format!("{name}.{number}"), x, conv))
}

/// The stem that Inception v3 and Inception-ResNet v2 have in common.
pub(super) fn inception_stem(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let window = crate::layer::Window::new(3).stride(2);
    net.scope("stem", |net| {
        let x = unit(net, "0", x, conv(32, 3).stride(2))?;
        let x = unit(net, "1", x, conv(32, 3))?;
        let x = unit(net, "2", x, conv(64, 3).same())?;
        let x = net.max_pool(x, window)?;
        let x = unit(net, "3", x, conv(80, 1))?;
        let x = unit(net, "4", x, conv(192, 3))?;
        net.max_pool(x, window)
    })
}
