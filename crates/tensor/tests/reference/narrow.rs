//! A row of the op table again, in bf16: the same graph with every input bf16 that an operation accepts as such.

use paceline_tensor::{Bf16, DType, Graph, Source, Value};

use super::array::Array;

/// The graph in bf16, where each value of the old one is in it, and whether anything became bf16.
pub struct Narrowed {
    pub graph: Graph,
    values: Vec<Option<Value>>,
}

impl Narrowed {
    /// Replays a graph. Where an operation does not take all its inputs as bf16, it gets as many as it takes.
    pub fn of(old: &Graph) -> Self {
        let mut narrowed = Self { graph: Graph::new(), values: vec![None; old.values().count()] };
        for &state in old.states() {
            let info = old.info(state);
            narrowed.values[state.index()] = Some(narrowed.graph.state(&info.name, info.shape.clone()));
        }
        for node in old.nodes() {
            let is_new = |value: &Value| {
                narrowed.values[value.index()].is_none() && matches!(old.info(*value).source, Source::Input(_))
            };
            let mut open: Vec<Value> = node.inputs.iter().copied().filter(is_new).collect();
            open.sort_unstable();
            open.dedup();
            // All of them first; of a few, every choice, the one with the most first.
            let choices = if open.len() > 6 { 1 } else { 1u32 << open.len() };
            let mut choices: Vec<u32> = (0..choices).collect();
            choices.sort_by_key(|full| full.count_ones());
            let attempt = |full: &u32| {
                let (mut graph, mut values) = (narrowed.graph.clone(), narrowed.values.clone());
                for (number, &input) in open.iter().enumerate() {
                    let info = old.info(input);
                    let narrow = info.dtype == DType::F32 && full.checked_shr(number as u32).unwrap_or(0) & 1 == 0;
                    let dtype = if narrow { DType::Bf16 } else { info.dtype };
                    values[input.index()] = Some(graph.input(&info.name, info.shape.clone(), dtype));
                }
                let inputs: Vec<Value> =
                    node.inputs.iter().map(|input| values[input.index()].expect("nodes stand in order")).collect();
                let outputs = graph.push(&node.layer, node.op.clone(), &inputs).ok()?;
                node.outputs.iter().zip(outputs).for_each(|(old, new)| values[old.index()] = Some(new));
                Some(Self { graph, values })
            };
            narrowed = choices.iter().find_map(attempt).expect("the operation takes f32 at least");
        }
        narrowed
    }

    /// Where a value of the old graph is in the new one.
    pub fn at(&self, old: Value) -> Value {
        self.values[old.index()].expect("every value is used")
    }

    /// Whether anything is bf16 at all.
    pub fn is_narrow(&self) -> bool {
        self.graph.values().any(|value| self.graph.dtype(value) == DType::Bf16)
    }
}

/// The numbers as a tensor of this type holds them.
pub fn rounded(array: Array, dtype: DType) -> Array {
    if dtype == DType::Bf16 { array.map(|x| f64::from(Bf16::from_f32(x as f32).to_f32())) } else { array }
}
