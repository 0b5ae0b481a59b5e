//! A small GPT for characters: GPT-2's block (Radford et al., 2019: normalise first, tanh GELU, learned positions),
//! its names and its start. The output layer has weights of its own, and there are as many positions as the input has.

use paceline_tensor::{GraphError, Unary, Value};

use super::Entry;
use crate::init::Init;
use crate::net::{Input, Net};

pub(super) const GPT: Entry = Entry {
    name: "gpt",
    family: "language",
    native: Input::Tokens { sequence: 128 },
    smallest: 1,
    classes: 65,
    summary: "characters: 4 layers, 4 heads, width 128",
    build,
};

const LAYERS: usize = 4;
const HEADS: usize = 4;
const WIDTH: usize = 128;
const DROPOUT: f32 = 0.1;
const START: Init = Init::Normal(0.02);
/// 0.02/√(2·layers): what is added to the residual stream keeps its variance however deep the model is.
const RESIDUAL_START: Init = Init::Normal(0.007_071_068);

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.embedding("wte", x, classes, WIDTH, START)?;
    let sequence = net.shape(x)[1];
    let positions = net.learned("wpe.weight", [sequence, WIDTH], START);
    let x = net.add(x, positions)?;
    let mut x = net.dropout(x, DROPOUT)?;
    for layer in 0..LAYERS {
        x = net.scope(format!("h.{layer}"), |net| {
            let y = net.layer_norm("ln_1", x)?;
            let y = net.scope("attn", |net| attention(net, y))?;
            let x = net.add(x, y)?;
            let y = net.layer_norm("ln_2", x)?;
            let y = net.scope("mlp", |net| perceptron(net, y))?;
            net.add(x, y)
        })?;
    }
    let x = net.layer_norm("ln_f", x)?;
    let rows = net.shape(x).elements() / WIDTH;
    let x = net.reshape(x, [rows, WIDTH])?;
    net.linear_with("lm_head", x, classes, START, None)
}

/// Every position looks at itself and those before it.
fn attention(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let (batch, sequence, size) = (net.shape(x)[0], net.shape(x)[1], WIDTH / HEADS);
    let all = project(net, "c_attn", x, 3 * WIDTH, START)?;
    let mut parts = [all; 3];
    for (number, part) in parts.iter_mut().enumerate() {
        let rows = net.slice(all, 2, number * WIDTH, WIDTH)?;
        let heads = net.reshape(rows, [batch, sequence, HEADS, size])?;
        *part = net.permute(heads, &[0, 2, 1, 3])?;
    }
    let [query, key, value] = parts;
    let scores = net.matmul(query, key, true)?;
    let scores = net.scale(scores, 1.0 / (size as f32).sqrt())?;
    let weights = net.softmax(scores, true)?;
    let weights = net.dropout(weights, DROPOUT)?;
    let heads = net.matmul(weights, value, false)?;
    let rows = net.permute(heads, &[0, 2, 1, 3])?;
    let joined = net.reshape(rows, [batch, sequence, WIDTH])?;
    let y = project(net, "c_proj", joined, WIDTH, RESIDUAL_START)?;
    net.dropout(y, DROPOUT)
}

fn perceptron(net: &mut Net, x: Value) -> Result<Value, GraphError> {
    let x = project(net, "c_fc", x, 4 * WIDTH, START)?;
    let x = net.unary(x, Unary::GeluTanh)?;
    let x = project(net, "c_proj", x, WIDTH, RESIDUAL_START)?;
    net.dropout(x, DROPOUT)
}

fn project(net: &mut Net, name: &str, x: Value, outputs: usize, init: Init) -> Result<Value, GraphError> {
    net.linear_with(name, x, outputs, init, Some(Init::Constant(0.0)))
}
