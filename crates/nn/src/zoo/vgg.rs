//! VGG (Simonyan and Zisserman, 2014), plain and with batch normalisation; layout, names and starts of torchvision.

use paceline_tensor::{GraphError, Value};

use super::{Entry, image};
use crate::init::Init;
use crate::layer::{Conv, Window};
use crate::net::Net;

/// Convolutions in each of the five stages, between which a maximum halves the image.
type Stages = [usize; 5];

const A: Stages = [1, 1, 2, 2, 2];
const B: Stages = [2, 2, 2, 2, 2];
const D: Stages = [2, 2, 3, 3, 3];
const E: Stages = [2, 2, 4, 4, 4];

pub(super) const VGG11: Entry = plain("vgg11", |net, x, classes| vgg(net, x, classes, A, false));
pub(super) const VGG13: Entry = plain("vgg13", |net, x, classes| vgg(net, x, classes, B, false));
pub(super) const VGG16: Entry = plain("vgg16", |net, x, classes| vgg(net, x, classes, D, false));
pub(super) const VGG19: Entry = plain("vgg19", |net, x, classes| vgg(net, x, classes, E, false));
pub(super) const VGG11_BN: Entry = normalised("vgg11_bn", |net, x, classes| vgg(net, x, classes, A, true));
pub(super) const VGG13_BN: Entry = normalised("vgg13_bn", |net, x, classes| vgg(net, x, classes, B, true));
pub(super) const VGG16_BN: Entry = normalised("vgg16_bn", |net, x, classes| vgg(net, x, classes, D, true));
pub(super) const VGG19_BN: Entry = normalised("vgg19_bn", |net, x, classes| vgg(net, x, classes, E, true));

type Build = fn(&mut Net, Value, usize) -> Result<Value, GraphError>;

const fn plain(name: &'static str, build: Build) -> Entry {
    let summary = "Simonyan and Zisserman 2014, torchvision's layout";
    Entry { name, family: "vgg", native: image(224), smallest: 32, classes: 1000, summary, build }
}

const fn normalised(name: &'static str, build: Build) -> Entry {
    Entry { summary: "VGG with batch normalisation, torchvision's layout", ..plain(name, build) }
}

fn vgg(net: &mut Net, x: Value, classes: usize, stages: Stages, norm: bool) -> Result<Value, GraphError> {
    let mut x = x;
    // Number in torchvision's list of features, where activations and poolings count too.
    let mut number = 0;
    for (convolutions, channels) in stages.into_iter().zip([64, 128, 256, 512, 512]) {
        for _ in 0..convolutions {
            let conv = Conv::new(channels, 3).pad(1).init(Init::KaimingFanOut).bias_init(Init::Constant(0.0));
            x = net.conv(&format!("features.{number}"), x, conv)?;
            if norm {
                x = net.batch_norm(&format!("features.{}", number + 1), x)?;
            }
            x = net.relu(x)?;
            number += 2 + usize::from(norm);
        }
        x = net.max_pool(x, Window::new(2))?;
        number += 1;
    }
    x = net.adaptive_average_pool(x, [7, 7])?;
    x = net.flatten(x)?;
    let (init, bias) = (Init::Normal(0.01), Some(Init::Constant(0.0)));
    for name in ["classifier.0", "classifier.3"] {
        x = net.linear_with(name, x, 4096, init, bias)?;
        x = net.relu(x)?;
        x = net.dropout(x, 0.5)?;
    }
    net.linear_with("classifier.6", x, classes, init, bias)
}
