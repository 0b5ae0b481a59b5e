//! Matrix products. Where an operand or the result is bf16, the product is of bf16 operands with sums in f32.

use super::super::CudaError;
use super::super::product::Product;
pub(super) use super::super::product::{Matrix, Multiply};
use super::super::program::{Address, At, Builder, Call, Tensor};
use crate::dtype::DType;
use crate::op::Op;

/// Appends a product.
pub(super) fn multiply(builder: &mut Builder<'_>, how: Multiply) -> Result<(), CudaError> {
    let product = Product::new(builder.cuda().blas(), how, builder.cuda().options().tf32)?;
    let workspace = builder.workspace(product.workspace_bytes());
    builder.call(Call::Product(Box::new(product.with_workspace(workspace))));
    Ok(())
}

/// The operand as `dtype`: as it stands, a parameter's rounded twin, or a rounded copy.
fn as_type(builder: &mut Builder<'_>, tensor: &Tensor<'_>, dtype: DType) -> Result<Address, CudaError> {
    match (tensor.dtype == dtype, tensor.rounded) {
        (true, _) => Ok(tensor.address),
        (false, Some(rounded)) if dtype == DType::Bf16 => Ok(rounded),
        _ => {
            let copy = builder.scratch(tensor.elements() * dtype.bytes());
            super::cast(builder, tensor.address, tensor.dtype, copy, dtype, tensor.elements())?;
            Ok(copy)
        }
    }
}

/// Appends the calls of [`Op::MatMul`].
pub(super) fn product(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let Op::MatMul { trans_a, trans_b, bias, relu } = at.node().op else { unreachable!("only products come here") };
    let (a, b, c) = (at.input(0), at.input(1), at.output(0));
    let dims = c.shape.len();
    let (m, n) = (c.shape[dims - 2], c.shape.last());
    let k = if trans_a { a.shape[dims - 2] } else { a.shape.last() };
    let narrow = [a.dtype, b.dtype, c.dtype].contains(&DType::Bf16);
    let dtype = if narrow { DType::Bf16 } else { DType::F32 };
    let matrix = |address: Address, tensor: &Tensor<'_>, trans: bool| Matrix {
        address,
        dtype,
        stride: tensor.shape.last(),
        trans,
    };
    let (a_address, b_address) = (as_type(builder, &a, dtype)?, as_type(builder, &b, dtype)?);
    // A bias is added in the product where it has the result's type, which the library asks for.
    let given = bias.then(|| at.input(2));
    let fused = given.as_ref().and_then(|bias| match (c.dtype, bias.rounded, bias.address) {
        (DType::F32, _, Address::Fixed(_)) => Some(bias.address),
        (DType::Bf16, Some(rounded), _) => Some(rounded),
        _ => None,
    });
    let left = if fused.is_some() { None } else { given };
    // Otherwise it is added in f32, before the result is rounded.
    let whole = left.is_some() && c.dtype != DType::F32;
    let sum = if whole { builder.scratch(c.elements() * DType::F32.bytes()) } else { c.address };
    let how = Multiply {
        m,
        n,
        k,
        a: matrix(a_address, &a, trans_a),
        b: matrix(b_address, &b, trans_b),
        c: sum,
        c_dtype: if left.is_some() { DType::F32 } else { c.dtype },
        c_stride: n,
        bias: fused,
        relu: relu && left.is_none(),
        accumulate: false,
        batch: c.elements() / (m * n),
        batch_strides: [m * k, k * n, m * n],
    };
    multiply(builder, how)?;
    let Some(bias) = left else { return Ok(()) };
    let wide = Tensor { address: sum, dtype: DType::F32, ..c.clone() };
    super::convolution::add_bias(builder, &wide, &bias, relu)?;
    if whole { super::cast(builder, sum, DType::F32, c.address, c.dtype, c.elements()) } else { Ok(()) }
}
