//! Products against a sum in double precision, on every instruction set and number of threads.

use paceline_system::random::Random;

use super::super::isa::Isa;
use super::super::pool::Pool;
use super::super::scratch::Scratch;
use super::super::simd::is_f32;
use super::*;
use crate::bf16::Bf16;

/// Numbers in (-1, 1), the same for the same seed.
pub(crate) fn numbers<E: Float>(seed: u64, count: usize) -> Vec<E> {
    let mut random = Random::new(&[seed]);
    (0..count).map(|_| E::from_f32(random.range(-1.0, 1.0))).collect()
}

/// Runs `kernel` on every instruction set of this machine with 1, 2 and 3 threads; the bits must agree between thread counts
/// and the values with `expected`, to a tolerance that grows with the number of terms in a sum.
pub(crate) fn check<C: Float>(name: &str, expected: &[f64], terms: usize, kernel: impl Fn(&mut Context<'_>) -> Vec<C>) {
    check_within(name, expected, (terms, 0.0), kernel);
}

/// As [`check`], allowing for some noise relative to the root mean square of what is expected.
pub(crate) fn check_within<C: Float>(
    name: &str,
    expected: &[f64],
    (terms, noise): (usize, f64),
    kernel: impl Fn(&mut Context<'_>) -> Vec<C>,
) {
    let noise = noise * (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let mut first: Option<Vec<C>> = None;
        for threads in 1..=3 {
            let (pool, mut scratch) = (Pool::new(threads), Scratch::new());
            let got = kernel(&mut Context { pool: &pool, isa, scratch: &mut scratch });
            assert_eq!(got.len(), expected.len());
            let rounding = if is_f32::<C>() { 0.0 } else { 2.0_f64.powi(-8) };
            let tolerance = 1e-6 * (terms as f64).sqrt() + 1e-6;
            let rounding = |want: f64| noise + rounding * want.abs();
            for (index, (&got, &want)) in got.iter().zip(expected).enumerate() {
                let got = got.to_f32();
                let (error, bound) = ((f64::from(got) - want).abs(), tolerance * want.abs().max(1.0));
                assert!(error <= bound + rounding(want), "{name} {isa:?} [{index}]: {got} is not {want}");
            }
            let same = first
                .as_ref()
                .is_none_or(|first| first.iter().zip(&got).all(|(a, b)| a.to_f32().to_bits() == b.to_f32().to_bits()));
            assert!(same, "{name} {isa:?}: bits change with {threads} threads");
            first.get_or_insert(got);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    shape: [usize; 3],
    batch: usize,
    transposed: [bool; 2],
    accumulate: bool,
    epilogue: bool,
}

/// The number that a product of `A` and `B` takes this one for.
pub(crate) fn taken<A: Float, B: Float>(value: impl Float) -> f64 {
    let plain = is_f32::<A>() && is_f32::<B>();
    f64::from(if plain { value.to_f32() } else { Bf16::from_f32(value.to_f32()).to_f32() })
}

fn run(case: Case) {
    run_as::<f32, f32, f32>(case);
    run_as::<Bf16, f32, Bf16>(case);
    run_as::<Bf16, Bf16, f32>(case);
    run_as::<f32, Bf16, Bf16>(case);
    run_as::<Bf16, Bf16, Bf16>(case);
}

fn run_as<A: Float, B: Float, C: Float>(case: Case) {
    let Case { shape: [m, n, k], batch, transposed, accumulate, epilogue } = case;
    let (a, b) = (numbers::<A>(1, batch * m * k), numbers::<B>(2, batch * k * n));
    let (c, bias) = (numbers::<C>(3, batch * m * n), numbers::<f32>(4, n));
    let at = |transposed: bool, row: usize, column: usize, rows: usize, columns: usize| {
        if transposed { column * rows + row } else { row * columns + column }
    };
    let mut expected = vec![0.0; batch * m * n];
    for (index, value) in expected.iter_mut().enumerate() {
        let (matrix, row, column) = (index / (m * n), index / n % m, index % n);
        let sum: f64 = (0..k)
            .map(|step| {
                let left = a[matrix * m * k + at(transposed[0], row, step, m, k)];
                let right = b[matrix * k * n + at(transposed[1], step, column, k, n)];
                taken::<A, B>(left) * taken::<A, B>(right)
            })
            .sum();
        *value = 0.5 * sum + if accumulate { f64::from(c[index].to_f32()) } else { 0.0 };
        if epilogue {
            *value = (*value + f64::from(bias[column])).max(0.0);
        }
    }
    check(&format!("{case:?}"), &expected, k, |context| {
        let a = matrix(&a, [m, k], transposed[0]);
        let plain = Gemm::new([m, n, k], a, matrix(&b, [k, n], transposed[1]));
        let epilogue = Epilogue::new(epilogue.then_some(&bias[..]), epilogue);
        let mut result = if accumulate { c.clone() } else { vec![C::from_f32(f32::NAN); c.len()] };
        let strides = Batch { count: batch, a_stride: m * k, b_stride: k * n, c_stride: m * n };
        gemm_batched(context, Gemm { scale: 0.5, accumulate, epilogue, ..plain }, strides, &mut result);
        result
    });
}

fn matrix<E: Float>(data: &[E], [rows, columns]: [usize; 2], transposed: bool) -> Matrix<'_, E> {
    if transposed { Matrix::row_major(data, rows).transposed() } else { Matrix::row_major(data, columns) }
}

#[test]
fn products_of_every_shape_and_layout_are_right() {
    let shapes = [
        [1, 1, 1],
        [1, 10, 700],
        [5, 3, 0],
        [3, 5, 2],
        [14, 32, 256],
        [15, 33, 257],
        [8, 300, 1100],
        [64, 17, 513],
        [300, 70, 40],
        [301, 16, 600],
        [530, 270, 9],
        [29, 48, 2100],
    ];
    for shape in shapes {
        for index in 0..8 {
            let transposed = [index & 1 > 0, index & 2 > 0];
            run(Case { shape, batch: 1, transposed, accumulate: index & 4 > 0, epilogue: index % 3 == 0 });
        }
    }
}

#[test]
fn batches_are_right() {
    for (index, shape) in [[7, 9, 64], [64, 64, 17], [270, 20, 30]].into_iter().enumerate() {
        run(Case { shape, batch: 5, transposed: [false, true], accumulate: false, epilogue: index == 1 });
        run(Case { shape, batch: 3, transposed: [true, false], accumulate: true, epilogue: false });
    }
}

#[test]
fn a_matrix_with_gaps_in_both_directions_is_read_right() {
    let (a, b) = (numbers::<f32>(1, 200), numbers::<f32>(2, 200));
    let strided = |data| Matrix { data, row_stride: 20, column_stride: 3 };
    let expected: Vec<f64> = (0..4 * 5)
        .map(|index| (0..6).map(|k| f64::from(a[index / 5 * 20 + k * 3]) * f64::from(b[k * 20 + index % 5 * 3])).sum())
        .collect();
    check("gaps", &expected, 6, |context| {
        let mut c = vec![0.0; 20];
        gemm(context, Gemm::new([4, 5, 6], strided(&a), strided(&b)), &mut c);
        c
    });
}

#[test]
fn a_result_too_large_for_the_caches_is_right() {
    let [m, n, k] = [1030, 4096, 2];
    let (a, b) = (numbers::<f32>(1, m * k), numbers::<f32>(2, k * n));
    let element = |index: usize, k: usize| f64::from(a[index / n * 2 + k]) * f64::from(b[k * n + index % n]);
    let expected: Vec<f64> = (0..m * n).map(|index| element(index, 0) + element(index, 1)).collect();
    check("large", &expected, k, |context| {
        let mut room = vec![f32::NAN; m * n + 16];
        // Only rows that start on a cache line are written past the caches.
        let start = room.as_ptr().align_offset(64);
        let plain = Gemm::new([m, n, k], Matrix::row_major(&a, k), Matrix::row_major(&b, n));
        gemm(context, plain, &mut room[start..start + m * n]);
        room[start..start + m * n].to_vec()
    });
}

#[test]
fn many_threads_cut_columns_further_and_give_the_same_bits() {
    // A gradient of weights, whose sums come in two shares of the depth, and a forward pass.
    for ([m, n, k], transposed) in [([2304, 256, 1024], true), ([4096, 250, 128], false)] {
        let (a, b) = (numbers::<f32>(1, m * k), numbers::<f32>(2, k * n));
        let product = |threads: usize| {
            let (pool, mut scratch) = (Pool::new(threads), Scratch::new());
            let mut result = vec![f32::NAN; m * n];
            let plain = Gemm::new([m, n, k], matrix(&a, [m, k], transposed), matrix(&b, [k, n], false));
            gemm(&mut Context { pool: &pool, isa: Isa::best(), scratch: &mut scratch }, plain, &mut result);
            result
        };
        let few = product(1);
        assert!(few.iter().zip(&product(16)).all(|(few, many)| few.to_bits() == many.to_bits()), "{m}×{n}×{k}");
    }
}

#[test]
#[should_panic(expected = "beyond its")]
fn an_operand_that_is_too_short_is_refused() {
    let (pool, mut scratch) = (Pool::new(1), Scratch::new());
    let mut context = Context { pool: &pool, isa: Isa::best(), scratch: &mut scratch };
    let data = [0.0f32; 12];
    let plain = Gemm::new([4, 4, 4], Matrix::row_major(&data, 4), Matrix::row_major(&data, 4));
    gemm(&mut context, plain, &mut [0.0f32; 16]);
}
