//! How far the mapped sums stray from the exact ones, beside the direct sums on the same data.

use super::super::super::context::Context;
use super::super::super::gemm::Epilogue;
use super::super::super::gemm::tests::numbers;
use super::super::super::isa::Isa;
use super::super::super::pool::Pool;
use super::super::super::scratch::Scratch;
use super::super::{Algorithm, ConvShape, conv2d_forward, conv2d_grad_input, conv2d_grad_weight};
use crate::bf16::Bf16;
use crate::dtype::Float;
use crate::window::{Conv2d, Padding};

/// The largest error and its root mean square, both over the root mean square of the exact values.
fn error<E: Float>(got: &[E], exact: &[f64]) -> [f64; 2] {
    let mean = |squares: &mut dyn Iterator<Item = f64>| (squares.sum::<f64>() / exact.len() as f64).sqrt();
    let scale = mean(&mut exact.iter().map(|x| x * x));
    let errors = || got.iter().zip(exact).map(|(got, exact)| (f64::from(got.to_f32()) - exact).abs());
    [errors().fold(0.0, f64::max) / scale, mean(&mut errors().map(|error| error * error)) / scale]
}

/// The errors of forward, gradient of the input and gradient of the weight by an algorithm.
fn errors<E: Float>(shape: &ConvShape, algorithm: Algorithm, data: &Data<E>) -> [[f64; 2]; 3] {
    let (pool, mut scratch) = (Pool::new(1), Scratch::new());
    let mut context = Context { pool: &pool, isa: Isa::best(), scratch: &mut scratch };
    let Data { x, w, dy, exact } = data;
    let (mut y, mut dx, mut dw) = (vec![E::default(); dy.len()], vec![E::default(); x.len()], vec![0.0; w.len()]);
    conv2d_forward(&mut context, shape, algorithm, x, w, Epilogue::default(), &mut y);
    conv2d_grad_input(&mut context, shape, algorithm, dy, w, &mut dx);
    conv2d_grad_weight(&mut context, shape, algorithm, x, dy, &mut dw);
    [error(&y, &exact[0]), error(&dx, &exact[1]), error(&dw, &exact[2])]
}

struct Data<E> {
    x: Vec<E>,
    w: Vec<f32>,
    dy: Vec<E>,
    exact: [Vec<f64>; 3],
}

fn data<E: Float>(shape: &ConvShape) -> Data<E> {
    let ([images, height, width, inputs], outputs) = (shape.x, shape.y[3]);
    // As behind a ReLU: half of the activations are zero and the rest positive.
    let count = images * height * width;
    let x: Vec<E> = numbers::<f32>(1, count * inputs).iter().map(|x| E::from_f32(x.max(0.0))).collect();
    let (w, dy) = (numbers::<f32>(2, 9 * inputs * outputs), numbers::<E>(3, count * outputs));
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
                let value = f64::from(x[from * inputs + input].to_f32());
                for output in 0..outputs {
                    let at = (tap * inputs + input) * outputs + output;
                    let (weight, gradient) = (f64::from(w[at]), f64::from(dy[pixel * outputs + output].to_f32()));
                    exact[0][pixel * outputs + output] += value * weight;
                    exact[1][from * inputs + input] += gradient * weight;
                    exact[2][at] += gradient * value;
                }
            }
        }
    }
    Data { x, w, dy, exact }
}

const SHAPES: [(usize, usize, usize); 4] = [(4, 40, 70), (16, 64, 32), (8, 256, 48), (4, 512, 64)];

fn shape((size, inputs, outputs): (usize, usize, usize)) -> ConvShape {
    let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
    ConvShape::new(conv, [2, size, size, inputs], outputs)
}

#[test]
fn the_error_is_a_few_times_that_of_direct_sums() {
    for shape in SHAPES.map(shape) {
        let data = data::<f32>(&shape);
        let direct = errors(&shape, Algorithm::Implicit, &data);
        let mapped = errors(&shape, Algorithm::Winograd, &data);
        println!("{:?}: direct {direct:?}, mapped {mapped:?}", shape.x);
        for ([direct, _], [mapped, _]) in direct.into_iter().zip(mapped) {
            assert!(mapped < 1e-5 && mapped < 8.0 * direct, "{:?}: {mapped:e} against {direct:e}", shape.x);
        }
    }
}

#[test]
fn in_bf16_the_error_is_noise_of_a_hundredth() {
    for shape in SHAPES.map(shape) {
        let data = data::<Bf16>(&shape);
        let direct = errors(&shape, Algorithm::Implicit, &data);
        let mapped = errors(&shape, Algorithm::Winograd, &data);
        println!("{:?}: direct {direct:?}, mapped {mapped:?}", shape.x);
        for [largest, mean] in mapped {
            assert!(mean < 0.02 && largest < 0.15, "{:?}: {mapped:?} against {direct:?}", shape.x);
        }
    }
}
