//! Inception v3 (Szegedy et al., 2015), layout of Keras: normalisation without scale, means over real pixels only, no
//! auxiliary head. Modules are named as there (`mixed0` … `mixed10`).

use paceline_tensor::{GraphError, Value};

use super::keras::{chain, conv, inception_stem, predictions, rectangular, unit};
use super::{Entry, image};
use crate::layer::Window;
use crate::net::Net;

pub(super) const INCEPTIONV3: Entry = Entry {
    name: "inceptionv3",
    family: "inception",
    native: image(299),
    smallest: 75,
    classes: 1000,
    summary: "Szegedy et al. 2015, Keras' layout",
    build,
};

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let mut x = inception_stem(net, x)?;
    for (name, pooled) in [("mixed0", 32), ("mixed1", 64), ("mixed2", 64)] {
        x = net.scope(name, |net| fives(net, x, pooled))?;
    }
    x = net.scope("mixed3", |net| shrink_first(net, x))?;
    for (name, width) in [("mixed4", 128), ("mixed5", 160), ("mixed6", 160), ("mixed7", 192)] {
        x = net.scope(name, |net| sevens(net, x, width))?;
    }
    x = net.scope("mixed8", |net| shrink_second(net, x))?;
    for name in ["mixed9", "mixed10"] {
        x = net.scope(name, |net| fans(net, x))?;
    }
    let x = net.global_average_pool(x)?;
    predictions(net, x, classes)
}

/// The branch that averages its surroundings.
fn pooled_branch(net: &mut Net, x: Value, channels: usize) -> Result<Value, GraphError> {
    let x = net.average_pool(x, Window::new(3).stride(1).same())?;
    unit(net, "branch_pool", x, conv(channels, 1).same())
}

/// 1×1, 5×5 and two 3×3.
fn fives(net: &mut Net, x: Value, pooled: usize) -> Result<Value, GraphError> {
    let one = unit(net, "branch1x1", x, conv(64, 1))?;
    let five = chain(net, "branch5x5", x, &[conv(48, 1), conv(64, 5).same()])?;
    let double = chain(net, "branch3x3dbl", x, &[conv(64, 1), conv(96, 3).same(), conv(96, 3).same()])?;
    let pool = pooled_branch(net, x, pooled)?;
    net.concat(&[one, five, double, pool])
}

fn shrink_first(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let three = unit(net, "branch3x3", x, conv(384, 3).stride(2))?;
    let double = chain(net, "branch3x3dbl", x, &[conv(64, 1), conv(96, 3).same(), conv(96, 3).stride(2)])?;
    let pool = net.max_pool(x, Window::new(3).stride(2))?;
    net.concat(&[three, double, pool])
}

/// 7×7 as 1×7 and 7×1, once and twice.
fn sevens(net: &mut Net, x: Value, width: usize) -> Result<Value, GraphError> {
    let (wide, tall) = ([1, 7], [7, 1]);
    let part = |channels, kernel| rectangular(channels, kernel).same();
    let one = unit(net, "branch1x1", x, conv(192, 1))?;
    let seven = chain(net, "branch7x7", x, &[conv(width, 1), part(width, wide), part(192, tall)])?;
    let double = [conv(width, 1), part(width, tall), part(width, wide), part(width, tall), part(192, wide)];
    let double = chain(net, "branch7x7dbl", x, &double)?;
    let pool = pooled_branch(net, x, 192)?;
    net.concat(&[one, seven, double, pool])
}

fn shrink_second(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let three = chain(net, "branch3x3", x, &[conv(192, 1), conv(320, 3).stride(2)])?;
    let seven =
        [conv(192, 1), rectangular(192, [1, 7]).same(), rectangular(192, [7, 1]).same(), conv(192, 3).stride(2)];
    let seven = chain(net, "branch7x7x3", x, &seven)?;
    let pool = net.max_pool(x, Window::new(3).stride(2))?;
    net.concat(&[three, seven, pool])
}

/// 3×3 as 1×3 beside 3×1.
fn fans(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let one = unit(net, "branch1x1", x, conv(320, 1))?;
    let three = unit(net, "branch3x3", x, conv(384, 1))?;
    let three = fan(net, "branch3x3", three)?;
    let double = chain(net, "branch3x3dbl", x, &[conv(448, 1), conv(384, 3).same()])?;
    let double = fan(net, "branch3x3dbl", double)?;
    let pool = pooled_branch(net, x, 192)?;
    net.concat(&[one, three, double, pool])
}

fn fan(net: &mut Net, name: &str, x: Value) -> Result<Value, GraphError> {
    let wide = unit(net, &format!("{name}_1"), x, rectangular(384, [1, 3]).same())?;
    let tall = unit(net, &format!("{name}_2"), x, rectangular(384, [3, 1]).same())?;
    net.concat(&[wide, tall])
}
