//! All three passes against sums in double precision, on every instruction set and number of threads.

use super::super::gemm::Epilogue;
use super::super::gemm::tests::{check_within, numbers, taken};
use super::super::simd::is_f32;
use super::*;
use crate::bf16::Bf16;
use crate::dtype::Float;
use crate::window::Padding;

/// Calls `visit(x, weight, y)` with the indices of every product in the convolution.
fn products(shape: &ConvShape, mut visit: impl FnMut(usize, usize, usize)) {
    let ([batch, height, width, inputs], [_, rows, columns, outputs]) = (shape.x, shape.y);
    let Conv2d { kernel, stride, padding, dilation, .. } = shape.conv;
    let (group_inputs, group_outputs) = (shape.group_inputs(), shape.group_outputs());
    for y in 0..batch * rows * columns * outputs {
        let (output, column, row) = (y % outputs, y / outputs % columns, y / outputs / columns % rows);
        let image = y / outputs / columns / rows;
        for tap in 0..kernel[0] * kernel[1] {
            let down = row * stride[0] + tap / kernel[1] * dilation[0];
            let across = column * stride[1] + tap % kernel[1] * dilation[1];
            let (Some(down), Some(across)) = (down.checked_sub(padding.top), across.checked_sub(padding.left)) else {
                continue;
            };
            if down >= height || across >= width {
                continue;
            }
            for channel in 0..group_inputs {
                let input = output / group_outputs * group_inputs + channel;
                let x = ((image * height + down) * width + across) * inputs + input;
                visit(x, (tap * group_inputs + channel) * outputs + output, y);
            }
        }
    }
}

fn run(conv: Conv2d, x_shape: [usize; 4], outputs: usize) {
    let shape = ConvShape::new(conv, x_shape, outputs);
    for algorithm in shape.candidates(ConvPass::Forward) {
        run_as::<f32>(&shape, algorithm);
        run_as::<Bf16>(&shape, algorithm);
    }
}

fn run_as<E: Float>(shape: &ConvShape, algorithm: Algorithm) {
    let outputs = shape.y[3];
    let name = format!("{algorithm:?} {shape:?}");
    let (x, w) = (numbers::<E>(1, shape.x.iter().product()), numbers::<f32>(2, shape.weights()));
    let (dy, bias) = (numbers::<E>(3, shape.y.iter().product()), numbers::<f32>(4, outputs));
    let (mut y, mut dx, mut dw) = (vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]);
    products(shape, |xi, wi, yi| {
        let (x, dy) = (f64::from(x[xi].to_f32()), f64::from(dy[yi].to_f32()));
        // Products round the weights to bf16; the others multiply in f32.
        let rounded = !matches!(algorithm, Algorithm::Depthwise | Algorithm::Winograd);
        let w = if rounded { taken::<E, f32>(w[wi]) } else { f64::from(w[wi]) };
        y[yi] += x * w;
        dx[xi] += dy * w;
        dw[wi] += dy * x;
    });
    let terms = shape.weights() / outputs;
    let pixels = dy.len() / outputs;
    let finished: Vec<f64> =
        y.iter().enumerate().map(|(index, y)| (y + f64::from(bias[index % outputs])).max(0.0)).collect();
    // The tolerance grows with the root of the terms; mapped sums may err by four times as much as direct ones.
    // In bf16 they are rounded once more, which a test beside the algorithm bounds more closely.
    let noise = if is_f32::<E>() { 0.0 } else { 0.2 };
    let allow = |terms| if algorithm == Algorithm::Winograd { (16 * terms, noise) } else { (terms, 0.0) };
    check_within(&format!("forward {name}"), &y, allow(terms), |context| {
        let mut result = vec![E::from_f32(f32::NAN); y.len()];
        conv2d_forward(context, shape, algorithm, &x, &w, Epilogue::default(), &mut result);
        result
    });
    check_within(&format!("forward with bias and ReLU {name}"), &finished, allow(terms), |context| {
        let mut result = vec![E::from_f32(f32::NAN); y.len()];
        let epilogue = Epilogue::new(Some(&bias), true);
        conv2d_forward(context, shape, algorithm, &x, &w, epilogue, &mut result);
        result
    });
    let biased: Vec<f64> = y.iter().enumerate().map(|(at, y)| y + f64::from(bias[at % outputs])).collect();
    check_within(&format!("forward with moments {name}"), &biased, allow(terms), |context| {
        let mut result = vec![E::from_f32(f32::NAN); y.len()];
        let [mut mean, mut variance] = [(); 2].map(|()| vec![f32::NAN; outputs]);
        let output = WithMoments { y: &mut result, mean: &mut mean, variance: &mut variance };
        conv2d_forward_with_moments(context, shape, algorithm, &x, &w, Epilogue::new(Some(&bias), false), output);
        for (channel, (mean, variance)) in mean.into_iter().zip(variance).enumerate() {
            check_moments(&name, result.iter().skip(channel).step_by(outputs), [mean, variance]);
        }
        result
    });
    check_within(&format!("gradient of the input {name}"), &dx, allow(terms * outputs), |context| {
        let mut result = vec![E::from_f32(f32::NAN); x.len()];
        conv2d_grad_input(context, shape, algorithm, &dy, &w, &mut result);
        result
    });
    check_within(&format!("gradient of the weight {name}"), &dw, allow(pixels), |context| {
        let mut result = vec![f32::NAN; w.len()];
        conv2d_grad_weight(context, shape, algorithm, &x, &dy, &mut result);
        result
    });
}

/// Holds the moments of a channel against those of its values as they are stored.
fn check_moments<'a, E: Float>(name: &str, values: impl Iterator<Item = &'a E> + Clone, found: [f32; 2]) {
    let count = values.clone().count() as f64;
    let values = values.map(|value| f64::from(value.to_f32()));
    let mean = values.clone().sum::<f64>() / count;
    let variance = values.map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let [found_mean, found_variance] = found.map(f64::from);
    assert!((found_mean - mean).abs() <= 1e-6 * (mean.abs() + variance.sqrt()), "{name}: {found_mean} is not {mean}");
    assert!((found_variance - variance).abs() <= 1e-6 * variance, "{name}: {found_variance} is not {variance}");
}

/// Among so many channels, the first value of some is far from their mean.
#[test]
fn moments_do_not_lose_digits_to_the_first_value() {
    run(Conv2d::square(1), [4, 5, 5, 16], 400);
    run(same(3), [4, 8, 8, 8], 200);
    run(Conv2d { groups: 200, ..same(3) }, [2, 12, 12, 200], 200);
}

fn same(kernel: usize) -> Conv2d {
    Conv2d { padding: Padding::all(kernel / 2), ..Conv2d::square(kernel) }
}

#[test]
fn ordinary_layers_are_right() {
    run(Conv2d::square(1), [2, 5, 7, 20], 33);
    run(Conv2d::square(1), [3, 20, 20, 1], 5);
    run(same(3), [2, 9, 11, 16], 16);
    run(same(3), [1, 4, 4, 40], 70);
    run(same(3), [4, 17, 16, 8], 24);
    run(same(5), [1, 6, 5, 3], 10);
    run(Conv2d { stride: [2, 2], padding: Padding::all(3), ..Conv2d::square(7) }, [2, 32, 30, 3], 17);
}

#[test]
fn strides_paddings_and_dilations_are_right() {
    let odd = Padding { top: 0, left: 2, bottom: 3, right: 1 };
    run(Conv2d { stride: [2, 2], ..same(3) }, [2, 9, 8, 6], 12);
    run(Conv2d { stride: [2, 2], ..Conv2d::square(1) }, [2, 7, 6, 18], 5);
    run(Conv2d { stride: [3, 1], padding: odd, ..Conv2d::square(3) }, [2, 8, 9, 5], 7);
    run(Conv2d { kernel: [2, 5], stride: [1, 2], padding: odd, ..Conv2d::square(1) }, [1, 6, 9, 4], 3);
    run(Conv2d { dilation: [2, 3], padding: Padding::all(2), ..Conv2d::square(3) }, [2, 8, 9, 5], 7);
    run(Conv2d { dilation: [2, 2], stride: [2, 3], padding: odd, ..Conv2d::square(3) }, [1, 9, 11, 5], 7);
    run(Conv2d { stride: [4, 4], ..Conv2d::square(2) }, [1, 11, 10, 3], 4);
    run(Conv2d { padding: Padding::all(4), ..Conv2d::square(2) }, [1, 2, 3, 2], 3);
}

#[test]
fn tiles_of_every_size_and_many_channels_are_right() {
    for size in 1..=9 {
        run(same(3), [2, size, 10 - size, 5], 7);
    }
    for padding in 0..=2 {
        run(Conv2d { padding: Padding::all(padding), ..Conv2d::square(3) }, [1, 7, 6, 18], 33);
    }
    let odd = Padding { top: 0, left: 2, bottom: 2, right: 1 };
    run(Conv2d { padding: odd, ..Conv2d::square(3) }, [3, 6, 9, 17], 40);
    // More channels than one block of the depth, and enough of both for the mapped weights to be made where they are used.
    run(same(3), [1, 5, 6, 330], 20);
    run(same(3), [2, 4, 4, 260], 140);
    run(same(3), [1, 11, 9, 130], 260);
}

#[test]
fn groups_are_right() {
    run(Conv2d { groups: 2, ..same(3) }, [2, 6, 7, 10], 36);
    run(Conv2d { groups: 4, stride: [2, 2], dilation: [1, 2], ..same(3) }, [1, 9, 8, 8], 12);
    run(Conv2d { groups: 3, ..Conv2d::square(1) }, [2, 13, 13, 6], 9);
}

#[test]
fn depthwise_layers_are_right() {
    let odd = Padding { top: 0, left: 2, bottom: 3, right: 1 };
    run(Conv2d { groups: 19, ..same(3) }, [2, 9, 10, 19], 19);
    run(Conv2d { groups: 32, stride: [2, 2], ..same(3) }, [2, 9, 10, 32], 32);
    run(Conv2d { groups: 5, stride: [2, 3], dilation: [2, 1], padding: odd, ..Conv2d::square(3) }, [2, 12, 11, 5], 5);
    run(Conv2d { groups: 17, ..same(5) }, [1, 3, 2, 17], 17);
    run(Conv2d { groups: 6, stride: [2, 2], ..Conv2d::square(1) }, [1, 5, 5, 6], 6);
    run(Conv2d { groups: 6, ..same(3) }, [2, 5, 6, 6], 12);
}
