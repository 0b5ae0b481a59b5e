//! Matrix products by cuBLASLt, with the bias and ReLU that may follow.
//!
//! Our matrices are row by row and the library's column by column, so it is asked for the transposed product: Cᵀ = Bᵀ·Aᵀ,
//! whose operands are the same bytes.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::cublaslt::sys;

use super::CudaError;
use super::driver::Stream;
use super::program::Address;
use crate::dtype::DType;

fn check(status: sys::cublasStatus_t, what: &str) -> Result<(), CudaError> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(CudaError(format!("cuBLASLt, {what}: {status:?}")))
}

/// Working memory that a product may ask for: what the library's fastest kernels want.
const WORKSPACE_MAX: usize = 32 << 20;

/// The library.
#[derive(Debug)]
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
}

// SAFETY: the handle is only read by calls, which the library allows from any thread.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Blas {
    /// Starts the library.
    pub fn new() -> Result<Self, CudaError> {
        let mut handle = null_mut();
        // SAFETY: the library writes one handle.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, "starting")?;
        Ok(Self { handle })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed nowhere else.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

/// An operand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    /// Where it starts.
    pub address: Address,
    /// Its type.
    pub dtype: DType,
    /// Elements between the starts of two rows, as it stands in memory.
    pub stride: usize,
    /// Whether it stands transposed.
    pub trans: bool,
}

/// C\[m,n\] (+)= A\[m,k\]·B\[k,n\], so many times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Multiply {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// A.
    pub a: Matrix,
    /// B, of A's type.
    pub b: Matrix,
    /// C.
    pub c: Address,
    /// Its type.
    pub c_dtype: DType,
    /// Elements between the starts of two of its rows.
    pub c_stride: usize,
    /// Added to every row, of C's type.
    pub bias: Option<Address>,
    /// What is below zero becomes zero, at the end.
    pub relu: bool,
    /// Whether C is added to.
    pub accumulate: bool,
    /// How many products.
    pub batch: usize,
    /// Elements between two products in A, B and C.
    pub batch_strides: [usize; 3],
}

/// A product that is ready to run.
#[derive(Debug)]
pub(super) struct Product {
    how: Multiply,
    description: Description,
    a: Layout,
    b: Layout,
    c: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Working memory: where it is, and how much.
    workspace: (Address, usize),
}

// SAFETY: descriptors that are only read once they are made.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn set<T: Copy>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), CudaError> {
        let pointer = std::ptr::from_ref(&value).cast();
        // SAFETY: the library copies that many bytes; callers give the type that the attribute has.
        let status = unsafe { sys::cublasLtMatmulDescSetAttribute(self.0, attribute, pointer, size_of::<T>()) };
        check(status, &format!("setting {attribute:?}"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A matrix that stands row by row: for the library, its transpose.
    fn new(dtype: DType, rows: usize, columns: usize, stride: usize, batch: (usize, usize)) -> Result<Self, CudaError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let mut layout = null_mut();
        // SAFETY: the library writes one handle.
        let status = unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut layout, data_type(dtype), columns as u64, rows as u64, stride as i64)
        };
        check(status, "describing a matrix")?;
        let layout = Self(layout);
        let (count, step) = (batch.0 as i32, batch.1 as i64);
        // SAFETY: the library copies an i32 and an i64, which are these attributes' types.
        unsafe {
            let set = sys::cublasLtMatrixLayoutSetAttribute;
            let count = (std::ptr::from_ref(&count).cast(), size_of::<i32>());
            check(set(layout.0, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count.0, count.1), "counting products")?;
            let step = (std::ptr::from_ref(&step).cast(), size_of::<i64>());
            let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            check(set(layout.0, attribute, step.0, step.1), "spacing products")?;
        }
        Ok(layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::I32 => sys::cudaDataType_t::CUDA_R_32I,
    }
}

/// The largest power of two up to 256 that divides an address; working memory starts on 256.
fn alignment(address: Address) -> u32 {
    let (Address::Fixed(number) | Address::Scratch(number)) = address;
    1 << number.trailing_zeros().min(8)
}

impl Product {
    /// Asks the library how it would compute it.
    pub fn new(blas: &Blas, how: Multiply, tf32: bool) -> Result<Self, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Multiply { m, n, k, a, b, batch, batch_strides, .. } = how;
        assert_eq!(a.dtype, b.dtype, "both operands are of one type");
        let compute = if tf32 && a.dtype == DType::F32 {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F
        };
        let mut description = null_mut();
        // SAFETY: the library writes one handle.
        let status =
            unsafe { sys::cublasLtMatmulDescCreate(&mut description, compute, sys::cudaDataType_t::CUDA_R_32F) };
        check(status, "describing a product")?;
        let description = Description(description);
        // 1 asks for the transpose of what the library sees, which is already ours transposed.
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(b.trans))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(a.trans))?;
        let epilogue: u32 = match (how.bias.is_some(), how.relu) {
            (false, false) => 1,
            (false, true) => 2,
            (true, false) => 4,
            (true, true) => 6,
        };
        description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        if let Some(bias) = how.bias {
            let Address::Fixed(address) = bias else { panic!("a bias is a parameter") };
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address)?;
        }
        let stored = |rows: usize, columns: usize, trans: bool| if trans { (columns, rows) } else { (rows, columns) };
        let ((a_rows, a_columns), (b_rows, b_columns)) = (stored(m, k, a.trans), stored(k, n, b.trans));
        let layout_a = Layout::new(a.dtype, a_rows, a_columns, a.stride, (batch, batch_strides[0]))?;
        let layout_b = Layout::new(b.dtype, b_rows, b_columns, b.stride, (batch, batch_strides[1]))?;
        let layout_c = Layout::new(how.c_dtype, m, n, how.c_stride, (batch, batch_strides[2]))?;
        let alignments = [alignment(b.address), alignment(a.address), alignment(how.c)];
        let (algorithm, bytes) = choose(blas, &description, [&layout_b, &layout_a, &layout_c], alignments)?;
        let workspace = (Address::Fixed(0), bytes);
        Ok(Self { how, description, a: layout_a, b: layout_b, c: layout_c, algorithm, workspace })
    }

    /// Bytes of working memory that it wants, aligned to 256.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.1
    }

    /// Gives it that memory.
    pub fn with_workspace(mut self, address: Address) -> Self {
        self.workspace.0 = address;
        self
    }

    /// Starts it.
    pub fn start(&self, blas: &Blas, stream: &Stream, scratch: u64) -> Result<(), CudaError> {
        let pointer = |address: Address| match address {
            Address::Fixed(address) => address as *mut c_void,
            Address::Scratch(offset) => (scratch + offset) as *mut c_void,
        };
        let (alpha, beta) = (1.0f32, if self.how.accumulate { 1.0f32 } else { 0.0 });
        let (alpha, beta) = (std::ptr::from_ref(&alpha).cast(), std::ptr::from_ref(&beta).cast());
        let (a, b, c) = (pointer(self.how.a.address), pointer(self.how.b.address), pointer(self.how.c));
        // SAFETY: the layouts describe these addresses, as the plan placed them; the scalars are copied before the call returns.
        let status = unsafe {
            let (lt_a, lt_b, lt_c) = (self.b.0, self.a.0, self.c.0);
            let (algorithm, workspace) = (&self.algorithm, pointer(self.workspace.0));
            let (description, stream) = (self.description.0, stream.handle().cast());
            sys::cublasLtMatmul(
                blas.handle,
                description,
                alpha,
                b,
                lt_a,
                a,
                lt_b,
                beta,
                c,
                lt_c,
                c,
                lt_c,
                algorithm,
                workspace,
                self.workspace.1,
                stream,
            )
        };
        check(status, "starting a product")
    }
}

/// The library's first choice, and the working memory that it wants.
fn choose(
    blas: &Blas,
    description: &Description,
    [a, b, c]: [&Layout; 3],
    alignments: [u32; 3],
) -> Result<(sys::cublasLtMatmulAlgo_t, usize), CudaError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let mut preference = null_mut();
    // SAFETY: the library writes one handle, copies the attributes (a u64 and u32s, as documented), and writes at most one result.
    unsafe {
        check(sys::cublasLtMatmulPreferenceCreate(&mut preference), "preferring")?;
        let bytes = WORKSPACE_MAX as u64;
        let set = sys::cublasLtMatmulPreferenceSetAttribute;
        let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let mut done = set(preference, workspace, std::ptr::from_ref(&bytes).cast(), size_of::<u64>());
        let names = [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[2]),
        ];
        for (name, value) in names {
            if done == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
                done = set(preference, name, std::ptr::from_ref(&value).cast(), size_of::<u32>());
            }
        }
        let (mut result, mut count) = (std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>(), 0);
        if done == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            done = sys::cublasLtMatmulAlgoGetHeuristic(
                blas.handle,
                description.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference,
                1,
                &mut result,
                &mut count,
            );
        }
        sys::cublasLtMatmulPreferenceDestroy(preference);
        check(done, "choosing an algorithm")?;
        if count == 0 {
            return Err(CudaError("cuBLASLt has no algorithm for this product".into()));
        }
        Ok((result.algo, result.workspaceSize))
    }
}
