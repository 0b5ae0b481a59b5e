//! How far the mapped sums stray from the exact ones, beside the direct sums on the same data.

use super::super::super::context::Context;
use super::super::super::gemm::Epilogue;
use super::super::super::gemm::tests::numbers;
use super::super::super::isa::Isa;
use super::super::super::pool::Pool;
use super::super::super::scratch::Scratch;
use super::super::{Algorithm, ConvShape, conv2d_forward, conv2d_grad_input, conv2d_grad_weight};
use crate::window::{Conv2d, Padding};

/// The largest error over the root mean square of the exact values.
fn error(got: &[f32], exact: &[f64]) -> f64 {
    let scale = (exact.iter().map(|x| x * x).sum::<f64>() / exact.len() as f64).sqrt();
    got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).abs()).fold(0.0, f64::max) / scale
}

/// The errors of [forward, gradient of the input, gradient of the weight] by an algorithm.
fn errors(shape: &ConvShape, algorithm: Algorithm, data: &Data) -> [f64; 3] {
    let (pool, mut scratch) = (Pool::new(1), Scratch::new());
    let mut context = Context { pool: &pool, isa: Isa::best(), scratch: &mut scratch };
    let Data { x, w, dy, exact } = data;
    let mut results = [vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]];
    conv2d_forward(&mut context, shape, algorithm, x, w, Epilogue::default(), &mut results[0]);
    conv2d_grad_input(&mut context, shape, algorithm, dy, w, &mut results[1]);
    conv2d_grad_weight(&mut context, shape, algorithm, x, dy, &mut results[2]);
    std::array::from_fn(|pass| error(&results[pass], &exact[pass]))
}

struct Data {
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
    exact: [Vec<f64>; 3],
}

fn data(shape: &ConvShape) -> Data {
    let ([images, height, width, inputs], outputs) = (shape.x, shape.y[3]);
    // As behind a ReLU: half of the activations are zero and the rest positive.
    let x: Vec<f32> = numbers::<f32>(1, images * height * width * inputs).iter().map(|x| x.max(0.0)).collect();
    let (w, dy) = (numbers::<f32>(2, 9 * inputs * outputs), numbers::<f32>(3, images * height * width * outputs));
    let mut exact = [vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]];
    for pixel in 0..images * height * width {
        let (row, column) = (pixel / width % height, pixel % width);
        for tap in 0..9 {
            let (from_row, from_column) = (row + tap / 3, column + tap % 3);
            if !(1..=height).contains(&from_row) || !(1..=width).contains(&from_column) {
                continue;
            }
            let from = (pixel / (height * width) * height + from_row - 1) * width + from_column - 1;
            for input in 0..inputs {
                let value = f64::from(x[from * inputs + input]);
                for output in 0..outputs {
                    let at = (tap * inputs + input) * outputs + output;
                    let (weight, gradient) = (f64::from(w[at]), f64::from(dy[pixel * outputs + output]));
                    exact[0][pixel * outputs + output] += value * weight;
                    exact[1][from * inputs + input] += gradient * weight;
                    exact[2][at] += gradient * value;
                }
            }
        }
    }
    Data { x, w, dy, exact }
}

#[test]
fn the_error_is_a_few_times_that_of_direct_sums() {
    for (size, inputs, outputs) in [(16, 64, 32), (8, 256, 48), (4, 512, 64)] {
        let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
        let shape = ConvShape::new(conv, [2, size, size, inputs], outputs);
        let data = data(&shape);
        let direct = errors(&shape, Algorithm::Implicit, &data);
        let mapped = errors(&shape, Algorithm::Winograd, &data);
        println!("{inputs} channels at {size}²: direct {direct:?}, mapped {mapped:?}");
        for (direct, mapped) in direct.into_iter().zip(mapped) {
            assert!(mapped < 1e-5 && mapped < 8.0 * direct, "{inputs} channels: {mapped:e} against {direct:e}");
        }
    }
}
