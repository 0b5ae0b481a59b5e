//! Operations that slide a window over an image.
//!
//! ONNX runtimes disagree on what a mean divides by where rounding up lets a window hang over the edge, so rounding up
//! is never asked for: the overhang becomes explicit padding, and where that changes a divisor the result is
//! multiplied by the ratio.

use paceline_tensor::Node;
use paceline_tensor::window::{Conv2d, Pool2d, PoolKind, Windows};

use super::proto::Attribute;
use super::{Exporter, Layout, Result, Tensor};
use crate::parameter::ForeignLayout;

/// The file's dims of an image's height and width.
const HEIGHT_AND_WIDTH: [usize; 2] = [2, 3];

impl Exporter<'_, '_> {
    pub(super) fn conv(&mut self, node: &Node, conv: &Conv2d) -> Result<Tensor> {
        let x = self.image(node.inputs[0]);
        let weight = node.inputs[1];
        let shape = self.shape(weight).clone();
        let layout = ForeignLayout::Convolution;
        let elements = layout.to_foreign(&shape, &self.elements(node, weight)?);
        let name = self.network.graph.info(weight).name.clone();
        let weight = self.writer.weights(&name, &layout.foreign_shape(&shape), &elements);
        let bias = node.inputs.get(2).map(|&bias| self.tensor(bias).name);
        let padding = conv.padding;
        let attributes = vec![
            Attribute::ints("kernel_shape", &conv.kernel),
            Attribute::ints("strides", &conv.stride),
            Attribute::ints("pads", &[padding.top, padding.left, padding.bottom, padding.right]),
            Attribute::ints("dilations", &conv.dilation),
            Attribute::int("group", conv.groups),
        ];
        let inputs: Vec<&str> = [&x.name, &weight].into_iter().chain(&bias).map(String::as_str).collect();
        let name = self.writer.node("Conv", &inputs, attributes);
        Ok(Tensor { name, ..x })
    }

    pub(super) fn pool(&mut self, node: &Node, pool: &Pool2d) -> Tensor {
        let shape = self.shape(node.inputs[0]);
        let size = [shape[1], shape[2]];
        let x = self.image(node.inputs[0]);
        let name = match pool.windows {
            Windows::Sliding { .. } => self.sliding(&x.name, pool, size),
            Windows::Adaptive { output: [1, 1] } => {
                let op_type = if pool.kind == PoolKind::Max { "GlobalMaxPool" } else { "GlobalAveragePool" };
                self.writer.node(op_type, &[&x.name], vec![])
            }
            Windows::Adaptive { output } => {
                if (0..2).all(|dim| size[dim].is_multiple_of(output[dim])) {
                    let kernel = [size[0] / output[0], size[1] / output[1]];
                    self.windows(&x.name, pool.kind, [kernel, kernel], [0; 4], true)
                } else {
                    self.uneven(x.name, pool, size, output)
                }
            }
        };
        Tensor { name, layout: Layout::Nchw, batch: x.batch }
    }

    fn sliding(&mut self, x: &str, pool: &Pool2d, size: [usize; 2]) -> String {
        let Windows::Sliding { kernel, stride, padding, count_padding, .. } = pool.windows else {
            unreachable!("only sliding windows come here")
        };
        let output = pool.output(size).expect("the graph checked that a window fits");
        let before = [padding.top, padding.left];
        let mut after = [padding.bottom, padding.right];
        for dim in 0..2 {
            let end = (output[dim] - 1) * stride[dim] + kernel[dim];
            after[dim] = after[dim].max(end.saturating_sub(size[dim] + before[dim]));
        }
        let grew = after != [padding.bottom, padding.right];
        let pads = [before[0], before[1], after[0], after[1]];
        let pooled = self.windows(x, pool.kind, [kernel, stride], pads, count_padding);
        if pool.kind == PoolKind::Max || !count_padding || !grew {
            return pooled;
        }
        // The runtime divided by the whole kernel, but what hangs over the padding counts for nothing.
        let divisor = |dim: usize| (0..output[dim]).map(move |index| pool.window(dim, index, size[dim]).2);
        let whole = (kernel[0] * kernel[1]) as f32;
        let ratios: Vec<f32> =
            divisor(0).flat_map(|rows| divisor(1).map(move |columns| whole / (rows * columns) as f32)).collect();
        let ratios = self.writer.floats(&[1, 1, output[0], output[1]], &ratios);
        self.writer.node("Mul", &[&pooled, &ratios], vec![])
    }

    /// Windows that all lie within the padded image.
    fn windows(
        &mut self,
        x: &str,
        kind: PoolKind,
        [kernel, stride]: [[usize; 2]; 2],
        pads: [usize; 4],
        count_padding: bool,
    ) -> String {
        let mut attributes = vec![
            Attribute::ints("kernel_shape", &kernel),
            Attribute::ints("strides", &stride),
            Attribute::ints("pads", &pads),
        ];
        if kind == PoolKind::Max {
            let pooled = self.writer.node("MaxPool", &[x], attributes);
            // onnxruntime folds a Pad with zeros into the pool that follows, where padding never wins; it leaves a pool
            // alone that also gives out the places of its maxima.
            if self.writer.is_from(x, "Pad") {
                self.writer.second_output(&pooled);
            }
            return pooled;
        }
        attributes.push(Attribute::int("count_include_pad", usize::from(count_padding)));
        self.writer.node("AveragePool", &[x], attributes)
    }

    /// Windows of different sizes: a slice for each row of windows, then one for each column. A mean of means of equally
    /// long rows is the mean.
    fn uneven(&mut self, mut x: String, pool: &Pool2d, size: [usize; 2], output: [usize; 2]) -> String {
        let reduce = if pool.kind == PoolKind::Max { "ReduceMax" } else { "ReduceMean" };
        for (dim, place) in HEIGHT_AND_WIDTH.into_iter().enumerate().filter(|&(dim, _)| size[dim] != output[dim]) {
            let parts: Vec<String> = (0..output[dim])
                .map(|index| {
                    let (start, end, _) = pool.window(dim, index, size[dim]);
                    let part = self.slice(&x, place, start, end - start);
                    let attributes = vec![Attribute::ints("axes", &[place]), Attribute::int("keepdims", 1)];
                    self.writer.node(reduce, &[&part], attributes)
                })
                .collect();
            let names: Vec<&str> = parts.iter().map(String::as_str).collect();
            x = self.writer.node("Concat", &names, vec![Attribute::int("axis", place)]);
        }
        x
    }
}
