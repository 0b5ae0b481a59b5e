//! Convolutions by cuDNN, and by kernels of our own where images have few channels (`stem.rs`, `narrow.rs`). What cuDNN does not take
//! as it is, is brought into a form that it takes: weights in another order, zeros that are not the same on both sides.

use super::super::convolution::{Convolution, Finish, Problem};
use super::super::program::{Address, Argument, At, Builder, Call, Tensor};
use super::super::{Cuda, CudaError};
use super::fold::Fold;
use super::narrow::Narrow;
use super::product::{Matrix, Multiply, multiply};
use super::stem::Stem;
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::op::Op;
use crate::window::{Conv2d, Padding};

/// Appends the calls of one of the three passes.
pub(super) fn convolution(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    match at.node().op {
        Op::Conv2d { conv, bias, relu, moments } => {
            forward(builder, at, conv, (bias, relu))?;
            let to = |index: usize| at.output(index).address;
            if moments { super::batch_norm::moments(builder, &at.output(0), [to(1), to(2)]) } else { Ok(()) }
        }
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
    let weight = weight(builder, &w, x.dtype)?;
    if let Some(stem) = Stem::new(ConvPass::Forward, (x.shape, x.dtype), conv, y.shape) {
        let end = (bias.map(|bias| bias.address), end.1);
        return stem.forward(builder, [x.address, weight, y.address], end, at.gate());
    }
    let narrow = Narrow::new(ConvPass::Forward, (image(&x), x.dtype), conv, image(&y));
    if let Some(narrow) = narrow.filter(|_| end == (false, false)) {
        return narrow.pass(builder, [x.address, weight, y.address]);
    }
    let (padded, plain, size) = padded(builder, &x, conv)?;
    let problem = |conv: Conv2d, image: [usize; 4], finish: Finish| Problem {
        pass: ConvPass::Forward,
        conv,
        image,
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
    let direct = problem(plain, size, Finish::None);
    let folded = Fold::new(&x, conv, image(&y))
        .filter(|fold| is_faster(builder, &problem(fold.conv, fold.image, Finish::None), &direct, fold.bytes()));
    let (plain, size, padded, weight) = match &folded {
        Some(fold) => (fold.conv, fold.image, fold.image(builder, &x)?, fold.weight(builder, weight, y.shape.last())?),
        None => (plain, size, padded, weight),
    };
    let [alone, fused] = [Finish::None, finish].map(|finish| problem(plain, size, finish));
    // What the library's fused kernel may cost more than one that is not: reading and writing the result once more.
    let pass = 2.0 * y.bytes() as f64 / SPEED;
    let fuses = |cuda: &Cuda| {
        let Ok(fused) = cuda.prepare(&fused) else { return false };
        let seconds = fused.engine.seconds.and_then(|fused| Some((fused, cuda.seconds(&alone)?)));
        seconds.is_none_or(|(fused, alone)| fused <= alone + pass)
    };
    if finish == Finish::None || fuses(builder.cuda()) {
        let address = bias.as_ref().map(|bias| bias.address);
        return start(builder, &fused, [padded, weight, y.address], address);
    }
    start(builder, &alone, [padded, weight, y.address], None)?;
    match bias {
        Some(bias) => add_bias(builder, &y, &bias, end.1),
        None => {
            builder.launch_each(&format!("relu_{}", y.suffix()), y.elements(), &[y.address.into(), y.elements().into()])
        }
    }
}

/// Bytes a second that a pass over memory is reckoned with where only an order of magnitude matters.
const SPEED: f64 = 3e12;

fn grad_input(builder: &mut Builder<'_>, at: &At<'_>, conv: Conv2d, input: [usize; 4]) -> Result<(), CudaError> {
    let (dy, w, dx) = (at.input(0), at.input(1), at.output(0));
    let weight = weight(builder, &w, dy.dtype)?;
    if let Some(narrow) = Narrow::new(ConvPass::GradInput, (input, dy.dtype), conv, image(&dy)) {
        return narrow.pass(builder, [dy.address, weight, dx.address]);
    }
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
    if let Some(stem) = Stem::new(ConvPass::GradWeight, (x.shape, x.dtype), conv, dy.shape) {
        return stem.gradient(builder, [x.address, dy.address], None, (&dw, None));
    }
    if let Some(narrow) = Narrow::new(ConvPass::GradWeight, (image(&x), x.dtype), conv, image(&dy)) {
        return narrow.gradient(builder, [x.address, dy.address], &dw);
    }
    let aligned = [&x, &dy].iter().all(|tensor| tensor.shape.last().is_multiple_of(8));
    if conv == Conv2d::square(1) && x.dtype == DType::Bf16 && aligned {
        return grad_weight_product(builder, &x, &dy, &dw);
    }
    let (padded, plain, size) = padded(builder, &x, conv)?;
    let outputs = dw.shape.last();
    let problem = |conv: Conv2d, image: [usize; 4], gradient: DType| Problem {
        pass: ConvPass::GradWeight,
        conv,
        image,
        channels: outputs,
        dtype: x.dtype,
        gradient,
        finish: Finish::None,
    };
    // Straight to its place, or by way of copies in another type or in another order.
    let ordered = if dw.channels_last { dw.address } else { builder.scratch(dw.bytes()) };
    let rounding = problem(plain, size, x.dtype);
    let folded = Fold::new(&x, conv, image(&dy))
        .filter(|fold| is_faster(builder, &problem(fold.conv, fold.image, x.dtype), &rounding, fold.bytes()));
    if let Some(fold) = folded {
        let image = fold.image(builder, &x)?;
        let gradient = builder.scratch(outputs * fold.taps() * x.dtype.bytes());
        start(builder, &problem(fold.conv, fold.image, x.dtype), [image, gradient, dy.address], None)?;
        let unfolded = fold.unfold(builder, gradient, outputs)?;
        super::cast(builder, unfolded, x.dtype, ordered, DType::F32, dw.elements())?;
    } else if x.dtype == DType::F32 || wider_is_as_fast(builder, &problem(plain, size, DType::F32), &rounding) {
        start(builder, &problem(plain, size, DType::F32), [padded, ordered, dy.address], None)?;
    } else {
        let rounded = builder.scratch(dw.elements() * x.dtype.bytes());
        start(builder, &rounding, [padded, rounded, dy.address], None)?;
        super::cast(builder, rounded, x.dtype, ordered, DType::F32, dw.elements())?;
    }
    if dw.channels_last {
        return Ok(());
    }
    super::layout::permute(
        builder,
        ordered,
        &[outputs, dw.elements() / outputs],
        &[1, 0],
        dw.address,
        DType::F32.bytes(),
    )
}

/// The gradient of the weights of a 1×1 layer: a product, straight to its place and in f32. cuDNN's engines round it, or take longer: for
/// 8,192 pixels from 1,024 to 256 channels 21 µs and the way to f32, against 12 µs (H200).
fn grad_weight_product(
    builder: &mut Builder<'_>,
    x: &Tensor<'_>,
    dy: &Tensor<'_>,
    dw: &Tensor<'_>,
) -> Result<(), CudaError> {
    let (inputs, outputs) = (x.shape.last(), dy.shape.last());
    let matrix = |tensor: &Tensor<'_>, trans: bool| Matrix {
        address: tensor.address,
        dtype: tensor.dtype,
        stride: tensor.shape.last(),
        trans,
    };
    let (m, n, a, b) = if dw.channels_last { (outputs, inputs, dy, x) } else { (inputs, outputs, x, dy) };
    let how = Multiply {
        m,
        n,
        k: x.elements() / inputs,
        a: matrix(a, true),
        b: matrix(b, false),
        c: dw.address,
        c_dtype: DType::F32,
        c_stride: n,
        bias: None,
        relu: false,
        accumulate: false,
        batch: 1,
        batch_strides: [0; 3],
    };
    multiply(builder, how)
}

/// Whether one problem was faster than another when both were tried, with so many bytes to be moved before it.
fn is_faster(builder: &Builder<'_>, one: &Problem, other: &Problem, bytes: usize) -> bool {
    let [one, other] = [one, other].map(|problem| builder.cuda().seconds(problem));
    one.zip(other).is_some_and(|(one, other)| one + bytes as f64 / SPEED < 0.9 * other)
}

/// Whether a gradient in f32 costs no more than one that is rounded and then widened. Where nothing was timed, rounding it is.
fn wider_is_as_fast(builder: &Builder<'_>, wide: &Problem, rounding: &Problem) -> bool {
    let cuda = builder.cuda();
    match cuda.prepare(rounding) {
        Ok(ready) => ready.engine.seconds.is_some_and(|most| cuda.seconds(wide).is_some_and(|wide| wide <= most)),
        Err(_) => cuda.prepare(wide).is_ok(),
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
    let workspace = builder.workspace(ready.workspace_bytes());
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
fn padded(builder: &mut Builder<'_>, x: &Tensor<'_>, conv: Conv2d) -> Result<(Address, Conv2d, [usize; 4]), CudaError> {
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
    arguments.extend(
        [from_size[1], from_size[2], to_size[1], to_size[2], to_size[3]].map(|size| Argument::Int(size as i32)),
    );
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
    let arguments =
        [y.address.into(), bias.address.into(), y.elements().into(), y.shape.last().into(), i32::from(relu).into()];
    let width = if y.dtype == DType::Bf16 { 8 } else { 4 };
    let (wide, pieces) =
        if y.shape.last().is_multiple_of(width) { ("_wide", y.elements() / width) } else { ("", y.elements()) };
    builder.launch_each(&format!("add_bias_{}{wide}", y.suffix()), pieces, &arguments)
}
