//! What training needs to know of a parameter beyond its shape.

use paceline_system::memory;
use paceline_tensor::Shape;

use crate::init::Init;

/// A trained tensor: its name, start and rules.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The name in weight files: torchvision's where the model is torchvision's.
    pub name: String,
    /// The shape in this engine.
    pub shape: Shape,
    /// How it starts.
    pub init: Init,
    /// Whether weight decay applies: not to biases and normalisation parameters.
    pub decay: bool,
    /// How other frameworks lay it out.
    pub layout: ForeignLayout,
}

/// A tensor kept from step to step without being trained: running statistics.
#[derive(Clone, Debug)]
pub struct State {
    /// The name in weight files.
    pub name: String,
    /// The shape.
    pub shape: Shape,
    /// What every element starts at.
    pub start: f32,
    /// How other frameworks lay it out.
    pub layout: ForeignLayout,
}

/// How PyTorch (and with it ONNX and most weight files) orders a tensor that this engine orders for NHWC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignLayout {
    /// The same order.
    Same,
    /// Here `[KH,KW,I,O]`, there `[O,I,KH,KW]`.
    Convolution,
    /// A linear weight whose inputs are a flattened image: here `[O, H·W·C]`, there `[O, C·H·W]`; or a vector with an
    /// element for each of its numbers, without the O.
    FlattenedImage {
        /// The image's height, width and channels.
        image: [usize; 3],
    },
}

/// Zeros for a tensor in another order: of a large layer several hundred megabytes, so a no is an error.
fn room(length: usize) -> Vec<f32> {
    memory::zeros(length, "a tensor in another order").unwrap_or_else(|refused| refused.unwind())
}

impl ForeignLayout {
    /// The shape there of a tensor that has `shape` here.
    pub fn foreign_shape(self, shape: &Shape) -> Shape {
        match (self, shape.nhwc()) {
            (Self::Convolution, Some([height, width, input, output])) => Shape::from([output, input, height, width]),
            _ => shape.clone(),
        }
    }

    /// Copies a tensor of `shape` from this engine's order to the foreign one.
    pub fn to_foreign(self, shape: &Shape, native: &[f32]) -> Vec<f32> {
        let mut foreign = room(native.len());
        self.pairs(shape, |here, there| foreign[there] = native[here]);
        foreign
    }

    /// Copies a tensor of `shape` (here) from the foreign order into this engine's.
    pub fn to_native(self, shape: &Shape, foreign: &[f32]) -> Vec<f32> {
        let mut native = room(foreign.len());
        self.pairs(shape, |here, there| native[here] = foreign[there]);
        native
    }

    /// Calls `pair(here, there)` for the two positions of every element.
    fn pairs(self, shape: &Shape, mut pair: impl FnMut(usize, usize)) {
        match (self, shape.nhwc()) {
            (Self::Convolution, Some([height, width, input, output])) => {
                let taps = height * width;
                for tap in 0..taps {
                    for i in 0..input {
                        for o in 0..output {
                            pair((tap * input + i) * output + o, (o * input + i) * taps + tap);
                        }
                    }
                }
            }
            (Self::FlattenedImage { image: [height, width, channels] }, _) => {
                let (pixels, row) = (height * width, height * width * channels);
                for o in 0..shape.elements() / row {
                    for pixel in 0..pixels {
                        for c in 0..channels {
                            pair(o * row + pixel * channels + c, o * row + c * pixels + pixel);
                        }
                    }
                }
            }
            _ => (0..shape.elements()).for_each(|index| pair(index, index)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_go_there_and_back() {
        let cases = [
            (ForeignLayout::Same, Shape::from([6, 4])),
            (ForeignLayout::Convolution, Shape::from([3, 2, 4, 5])),
            (ForeignLayout::FlattenedImage { image: [2, 3, 4] }, Shape::from([5, 24])),
            (ForeignLayout::FlattenedImage { image: [2, 3, 4] }, Shape::from([24])),
        ];
        for (layout, shape) in cases {
            let native: Vec<f32> = (0..shape.elements()).map(|index| index as f32).collect();
            let foreign = layout.to_foreign(&shape, &native);
            assert_eq!(layout.to_native(&shape, &foreign), native);
            assert_eq!(foreign == native, layout == ForeignLayout::Same);
        }
    }

    #[test]
    fn a_convolution_weight_is_output_major_there() {
        let shape = Shape::from([1, 1, 2, 3]);
        let foreign = ForeignLayout::Convolution.to_foreign(&shape, &[0., 1., 2., 10., 11., 12.]);
        assert_eq!(foreign, [0., 10., 1., 11., 2., 12.]);
    }
}
