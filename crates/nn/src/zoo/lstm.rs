//! A character language model of two LSTM layers (Hochreiter and Schmidhuber, 1997), started as PyTorch does.

use paceline_tensor::{GraphError, Value};

use super::Entry;
use crate::init::Init;
use crate::net::{Input, Net};

pub(super) const LSTM: Entry = Entry {
    name: "lstm",
    family: "language",
    native: Input::Tokens { sequence: 128 },
    smallest: 1,
    classes: 65,
    summary: "characters: embedding 128, two LSTM layers of 256",
    build,
};

fn build(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let mut x = net.embedding("embedding", x, classes, 128, Init::Normal(1.0))?;
    for layer in 0..2 {
        x = net.lstm("lstm", layer, x, 256)?;
        x = net.dropout(x, 0.2)?;
    }
    let rows = net.shape(x).elements() / net.channels(x);
    let x = net.reshape(x, [rows, 256])?;
    net.linear("head", x, classes)
}
