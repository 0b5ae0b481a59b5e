//! Convolutions by cuDNN. What it does not take as it is, is brought into a form that it takes: weights in another order, zeros
//! that are not the same on both sides.

use super::super::CudaError;
use super::super::convolution::{Convolution, Finish, Problem};
use super::super::program::{Address, Argument, At, Builder, Call, Tensor};
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::op::Op;
use crate::window::{Conv2d, Padding};

/// Appends the calls of one of the three passes.
pub(super) fn convolution(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    match at.node().op {
        Op::Conv2d { conv, bias, relu } => forward(builder, at, conv, (bias, relu)),
        Op::Conv2dGradInput { conv, input } => grad_input(builder, at, conv, input),
        Op::Conv2dGradWeight { conv } => grad_weight(builder, at, conv),
        _ => unreachable!("only convolutions come here"),
    }
}

fn image(tensor: &Tensor<'_>) -> [usize; 4] {
    tensor.shape.nhwc().expect("a convolution has images")
}

fn forward(builder: &mut Builder<'_>, at: &At<'_>, conv: Conv2d, end: (bool, bool)) -> Result<(), CudaError> {
    let (x, w, y) = (at.input(0), at.input(1), at.output(0));
    let bias = end.0.then(|| at.input(2));
    let mut weight = weight(builder, &w, x.dtype)?;
    let (mut padded, conv, mut size) = padded(builder, &x, conv)?;
    let problem = |size: [usize; 4], finish: Finish| Problem {
        pass: ConvPass::Forward,
        conv,
        image: size,
        channels: y.shape.last(),
        dtype: x.dtype,
        gradient: DType::F32,
        finish,
    };
    let finish = match end {
        (false, false) => Finish::None,
        (false, true) => Finish::Relu,
        (true, false) => Finish::Bias,
        (true, true) => Finish::BiasRelu,
    };
    let address = bias.as_ref().map(|bias| bias.address);
    if let Some(channels) = more_channels(builder, &problem(size, Finish::None)) {
        let kernel = conv.kernel[0] * conv.kernel[1];
        weight = recut(builder, weight, y.shape.last() * kernel, (size[3], channels), x.dtype)?;
        padded = recut(builder, padded, size[..3].iter().product(), (size[3], channels), x.dtype)?;
        size[3] = channels;
    }
    if finish == Finish::None || builder.cuda().prepare(&problem(size, finish)).is_ok() {
        return start(builder, &problem(size, finish), [padded, weight, y.address], address);
    }
    start(builder, &problem(size, Finish::None), [padded, weight, y.address], None)?;
    match bias {
        Some(bias) => add_bias(builder, &y, &bias, end.1),
        None => builder.launch_each(&format!("relu_{}", y.suffix()), y.elements(), &[y.address.into(), y.elements().into()]),
    }
}

fn grad_input(builder: &mut Builder<'_>, at: &At<'_>, conv: Conv2d, input: [usize; 4]) -> Result<(), CudaError> {
    let (dy, w, dx) = (at.input(0), at.input(1), at.output(0));
    let weight = weight(builder, &w, dy.dtype)?;
    let (plain, size) = without_padding(conv, input);
    let problem = Problem {
        pass: ConvPass::GradInput,
        conv: plain,
        image: size,
        channels: dy.shape.last(),
        dtype: dy.dtype,
        gradient: DType::F32,
        finish: Finish::None,
    };
    if plain == conv {
        return start(builder, &problem, [dx.address, weight, dy.address], None);
    }
    let whole = builder.scratch(size.iter().product::<usize>() * dx.dtype.bytes());
    start(builder, &problem, [whole, weight, dy.address], None)?;
    let Padding { top, left, .. } = conv.padding;
    place(builder, (whole, size), (dx.address, input), [top as i32, left as i32], dx.dtype)
}

fn grad_weight(builder: &mut Builder<'_>, at: &At<'_>, conv: Conv2d) -> Result<(), CudaError> {
    let (x, dy, dw) = (at.input(0), at.input(1), at.output(0));
    let (mut padded, conv, mut size) = padded(builder, &x, conv)?;
    let problem = |size: [usize; 4], gradient: DType| Problem {
        pass: ConvPass::GradWeight,
        conv,
        image: size,
        channels: dy.shape.last(),
        dtype: x.dtype,
        gradient,
        finish: Finish::None,
    };
    let (taps, given) = (dw.elements() / size[3] * conv.groups, size[3]);
    if let Some(channels) = more_channels(builder, &problem(size, x.dtype)) {
        padded = recut(builder, padded, size[..3].iter().product(), (given, channels), x.dtype)?;
        size[3] = channels;
    }
    let full = x.dtype == DType::F32
        || wider_is_as_fast(builder, &problem(size, DType::F32), &problem(size, x.dtype));
    let gradient = if full { DType::F32 } else { x.dtype };
    // Straight to its place, or by way of copies with fewer channels, in another type or in another order.
    let ordered = if dw.channels_last { dw.address } else { builder.scratch(dw.bytes()) };
    let straight = full && size[3] == given;
    let wide = if straight { ordered } else { builder.scratch(taps * size[3] * gradient.bytes()) };
    start(builder, &problem(size, gradient), [padded, wide, dy.address], None)?;
    let narrow = if size[3] == given { wide } else { recut(builder, wide, taps, (size[3], given), gradient)? };
    if !straight {
        super::cast(builder, narrow, gradient, ordered, DType::F32, dw.elements())?;
    }
    if dw.channels_last {
        return Ok(());
    }
    let outputs = dw.shape.last();
    super::layout::permute(builder, ordered, &[outputs, dw.elements() / outputs], &[1, 0], dw.address, DType::F32.bytes())
}

/// How many channels an image of a few had better have: cuDNN's matrix kernels take four or eight at a time, and more channels
/// than there are, zeros, cost less than another kind of kernel.
fn more_channels(builder: &Builder<'_>, problem: &Problem) -> Option<usize> {
    let given = problem.image[3];
    if problem.dtype != DType::Bf16 || problem.conv.groups > 1 || given >= 8 {
        return None;
    }
    let seconds = |channels: usize| {
        let [n, h, w, _] = problem.image;
        builder.cuda().prepare(&Problem { image: [n, h, w, channels], ..*problem }).ok()?.engine.seconds
    };
    let candidates = [4, 8].into_iter().filter(|&channels| channels > given);
    let timed = candidates.filter_map(|channels| Some((seconds(channels)?, channels)));
    let best = timed.min_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 < 0.8 * seconds(given)?).then_some(best.1)
}

/// The same pixels with more channels, of zeros, or with fewer.
fn recut(
    builder: &mut Builder<'_>,
    from: Address,
    pixels: usize,
    (given, wanted): (usize, usize),
    dtype: DType,
) -> Result<Address, CudaError> {
    let to = builder.scratch(pixels * wanted * dtype.bytes());
    let arguments = [from.into(), to.into(), pixels.into(), (given as i32).into(), (wanted as i32).into()];
    builder.launch_each(&format!("recut_channels_{}", dtype.bytes()), pixels * wanted, &arguments)?;
    Ok(to)
}

/// Whether a gradient in f32 costs no more than one that is rounded and then widened. Where nothing was timed, rounding it is.
fn wider_is_as_fast(builder: &Builder<'_>, wide: &Problem, narrow: &Problem) -> bool {
    let [wide, narrow] = [wide, narrow].map(|problem| builder.cuda().prepare(problem));
    match (wide, narrow) {
        (Ok(wide), Ok(narrow)) => wide.engine.seconds.zip(narrow.engine.seconds).is_some_and(|(wide, narrow)| wide <= narrow),
        (wide, _) => wide.is_ok(),
    }
}

/// Appends a convolution.
fn start(
    builder: &mut Builder<'_>,
    problem: &Problem,
    tensors: [Address; 3],
    bias: Option<Address>,
) -> Result<(), CudaError> {
    let ready = builder.cuda().prepare(problem)?;
    let workspace = builder.scratch(ready.workspace_bytes());
    builder.call(Call::Convolution(Convolution::new(ready, tensors, bias, workspace)));
    Ok(())
}

/// The weight in cuDNN's order and the images' type.
fn weight(builder: &mut Builder<'_>, w: &Tensor<'_>, dtype: DType) -> Result<Address, CudaError> {
    let ordered = match (w.channels_last, dtype, w.rounded) {
        (true, DType::Bf16, Some(rounded)) => return Ok(rounded),
        (true, _, _) => w.address,
        (false, _, _) => {
            let (copy, outputs) = (builder.scratch(w.bytes()), w.shape.last());
            let shape = [w.elements() / outputs, outputs];
            super::layout::permute(builder, w.address, &shape, &[1, 0], copy, w.dtype.bytes())?;
            copy
        }
    };
    if w.dtype == dtype {
        return Ok(ordered);
    }
    let rounded = builder.scratch(w.elements() * dtype.bytes());
    super::cast(builder, ordered, w.dtype, rounded, dtype, w.elements())?;
    Ok(rounded)
}

/// A convolution whose zeros are the same on both sides stays; any other one becomes one without, on a larger image.
fn without_padding(conv: Conv2d, [n, h, w, c]: [usize; 4]) -> (Conv2d, [usize; 4]) {
    let Padding { top, left, bottom, right } = conv.padding;
    if top == bottom && left == right {
        return (conv, [n, h, w, c]);
    }
    (Conv2d { padding: Padding::all(0), ..conv }, [n, h + top + bottom, w + left + right, c])
}

/// The image with its zeros around it, where cuDNN does not put them there itself.
fn padded(
    builder: &mut Builder<'_>,
    x: &Tensor<'_>,
    conv: Conv2d,
) -> Result<(Address, Conv2d, [usize; 4]), CudaError> {
    let (plain, size) = without_padding(conv, image(x));
    if plain == conv {
        return Ok((x.address, conv, size));
    }
    let whole = builder.scratch(size.iter().product::<usize>() * x.dtype.bytes());
    let Padding { top, left, .. } = conv.padding;
    place(builder, (x.address, image(x)), (whole, size), [-(top as i32), -(left as i32)], x.dtype)?;
    Ok((whole, plain, size))
}

/// Copies an image: pixel (h, w) of the result is pixel (h, w) + `shift` of the source, or zero where that is none.
fn place(
    builder: &mut Builder<'_>,
    (from, from_size): (Address, [usize; 4]),
    (to, to_size): (Address, [usize; 4]),
    shift: [i32; 2],
    dtype: DType,
) -> Result<(), CudaError> {
    let elements: usize = to_size.iter().product();
    let mut arguments: Vec<Argument> = vec![from.into(), to.into(), elements.into()];
    arguments.extend([from_size[1], from_size[2], to_size[1], to_size[2], to_size[3]].map(|size| Argument::Int(size as i32)));
    arguments.extend(shift.map(Argument::Int));
    builder.launch_each(&format!("place_image_{}", dtype.bytes()), elements, &arguments)
}

/// Adds a bias to every row of a result, and applies ReLU if asked to.
pub(super) fn add_bias(
    builder: &mut Builder<'_>,
    y: &Tensor<'_>,
    bias: &Tensor<'_>,
    relu: bool,
) -> Result<(), CudaError> {
    let arguments = [y.address.into(), bias.address.into(), y.elements().into(), y.shape.last().into(), i32::from(relu).into()];
    builder.launch_each(&format!("add_bias_{}", y.suffix()), y.elements(), &arguments)
}
