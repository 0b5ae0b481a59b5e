//! Inception-ResNet v2 (Szegedy et al., 2016), layout of Keras: inception modules as residual branches, scaled down
//! before they are added.

use paceline_tensor::{GraphError, Value};

use super::keras::{chain, conv, conv_bias, inception_stem, predictions, rectangular, unit};
use super::{Entry, image};
use crate::layer::{Conv, Window};
use crate::net::Net;

pub(super) const INCEPTIONRESNETV2: Entry = Entry {
    name: "inceptionresnetv2",
    family: "inception",
    native: image(299),
    smallest: 75,
    classes: 1000,
    summary: "Szegedy et al. 2016, Keras' layout",
    build,
};

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = inception_stem(net, x)?;
    let mut x = net.scope("mixed_5b", |net| mixed_5b(net, x))?;
    for number in 1..=10 {
        x = net.scope(format!("block35_{number}"), |net| {
            let third = [conv(32, 1), conv(48, 3).same(), conv(64, 3).same()];
            residual(net, x, &[&[conv(32, 1)], &[conv(32, 1), conv(32, 3).same()], &third], 0.17)
        })?;
        x = net.relu(x)?;
    }
    x = net.scope("mixed_6a", |net| {
        let second = [conv(256, 1), conv(256, 3).same(), conv(384, 3).stride(2)];
        shrink(net, x, &[&[conv(384, 3).stride(2)], &second])
    })?;
    for number in 1..=20 {
        x = net.scope(format!("block17_{number}"), |net| {
            let second = [conv(128, 1), rectangular(160, [1, 7]).same(), rectangular(192, [7, 1]).same()];
            residual(net, x, &[&[conv(192, 1)], &second], 0.1)
        })?;
        x = net.relu(x)?;
    }
    x = net.scope("mixed_7a", |net| {
        let third = [conv(256, 1), conv(288, 3).same(), conv(320, 3).stride(2)];
        let strided = |channels| [conv(256, 1), conv(channels, 3).stride(2)];
        shrink(net, x, &[&strided(384), &strided(288), &third])
    })?;
    for number in 1..=10 {
        // The last block is added as it is and not activated.
        let last = number == 10;
        x = net.scope(format!("block8_{number}"), |net| {
            let second = [conv(192, 1), rectangular(224, [1, 3]).same(), rectangular(256, [3, 1]).same()];
            residual(net, x, &[&[conv(192, 1)], &second], if last { 1.0 } else { 0.2 })
        })?;
        x = if last { x } else { net.relu(x)? };
    }
    let x = unit(net, "conv_7b", x, conv(1536, 1))?;
    let x = net.global_average_pool(x)?;
    predictions(net, x, classes)
}

fn mixed_5b(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let first = chain(net, "branch_0", x, &[conv(96, 1)])?;
    let second = chain(net, "branch_1", x, &[conv(48, 1), conv(64, 5).same()])?;
    let third = chain(net, "branch_2", x, &[conv(64, 1), conv(96, 3).same(), conv(96, 3).same()])?;
    let pool = net.average_pool(x, Window::new(3).stride(1).same())?;
    let pool = chain(net, "branch_pool", pool, &[conv(64, 1)])?;
    net.concat(&[first, second, third, pool])
}

/// Chains of convolutions side by side.
fn branches(net: &mut Net, x: Value, chains: &[&[Conv]]) -> Result<Vec<Value>, GraphError> {
    chains.iter().enumerate().map(|(number, convs)| chain(net, &format!("branch_{number}"), x, convs)).collect()
}

/// x + scale · (the branches, brought back to x's channels).
fn residual(net: &mut Net, x: Value, chains: &[&[Conv]], scale: f32) -> Result<Value, GraphError> {
    let parts = branches(net, x, chains)?;
    let mixed = net.concat(&parts)?;
    let up = net.conv("conv", mixed, conv_bias(net.channels(x), 1))?;
    let up = if scale == 1.0 { up } else { net.scale(up, scale)? };
    net.add(x, up)
}

/// The branches and a maximum, all at half the size.
fn shrink(net: &mut Net, x: Value, chains: &[&[Conv]]) -> Result<Value, GraphError> {
    let mut parts = branches(net, x, chains)?;
    parts.push(net.max_pool(x, Window::new(3).stride(2))?);
    net.concat(&parts)
}
