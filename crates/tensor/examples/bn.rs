#![allow(unsafe_code, clippy::all)]
//! scratch
use paceline_tensor::device::cpu::{batch_norm::*, context::Context, elementwise, isa::Isa, pool::Pool, pooling::{self, Pooling}, reduce, scratch::Scratch, dropout};
use paceline_tensor::window::*;
use paceline_tensor::{Bf16, Float, Unary, buffer::Buffer};
use std::time::Instant;
fn take<E: Float>(n: usize, f: impl Fn(usize) -> f32) -> &'static mut [E] {
    let words = (n * size_of::<E>()).div_ceil(4);
    let b: &'static mut Buffer = Box::leak(Box::new(Buffer::zeroed(words)));
    let p = b.as_mut_ptr().cast::<E>();
    let s = unsafe { std::slice::from_raw_parts_mut(p, n) };
    for (i, x) in s.iter_mut().enumerate() { *x = E::from_f32(f(i)); }
    s
}
fn time(mut f: impl FnMut()) -> f64 { f(); let mut best = f64::MAX; for _ in 0..match std::env::args().nth(1).as_deref() { Some("small") => 2000, Some("big") => 40, _ => 7 } { let t = Instant::now(); f(); best = best.min(t.elapsed().as_secs_f64()); } best }
fn run<E: Float>(name: &str, rows: usize, c: usize, pool: &Pool, isa: Isa) {
    let n = rows * c;
    let h = |i: usize| ((i as u32).wrapping_mul(2654435761) >> 8) as f32 / 8388608.0 - 1.0;
    let (x, dy, y, res, dx) = (take::<E>(n, h), take::<E>(n, |i| h(i + 77)), take::<E>(n, |_| 0.0), take::<E>(n, h), take::<E>(n, |_| 0.0));
    let (gamma, beta) = (vec![1.0; c], vec![0.1; c]);
    let (mut mean, mut inv, mut rm, mut rv) = (vec![0.0; c], vec![0.0; c], vec![0.0; c], vec![1.0; c]);
    let mut scratch = Scratch::new();
    let mut cx = Context { pool, isa, scratch: &mut scratch };
    let b = (n * size_of::<E>()) as f64;
    let mut report = |what: &str, streams: f64, t: f64| print!(" {what} {:.2}ms {:.1}cyc {:.1}GB/s({streams})", t * 1e3, t * 3.7e9 / (n as f64 / 16.0), streams * b / t / 1e9);
    print!("{name} {rows}x{c} {:.1}MB:", b / 1e6);
    let t = time(|| train(&mut cx, &BatchNorm { x, gamma: Some(&gamma), beta: &beta, residual: None, rectifier: paceline_tensor::op::Rectifier::Relu, eps: 1e-5 }, TrainOutput { y, mean: &mut mean, inv_std: &mut inv, running: Running { mean: &mut rm, variance: &mut rv, momentum: 0.1 } }));
    report("bn+relu", 3.0, t);
    let t = time(|| train(&mut cx, &BatchNorm { x, gamma: Some(&gamma), beta: &beta, residual: Some(res), rectifier: paceline_tensor::op::Rectifier::Relu, eps: 1e-5 }, TrainOutput { y, mean: &mut mean, inv_std: &mut inv, running: Running { mean: &mut rm, variance: &mut rv, momentum: 0.1 } }));
    report("bn+add+relu", 4.0, t);
    let (mut dg, mut db) = (vec![0.0; c], vec![0.0; c]);
    let t = time(|| gradient(&mut cx, &BatchNormGrad { dy: None, x, mask: Mask::FromInput(&beta), gamma: Some(&gamma), mean: &mean, inv_std: &inv, ceiling: f32::INFINITY }, GradOutput { dx: dy, dgamma: Some(&mut dg), dbeta: &mut db, dresidual: None }));
    report("grad(in place)", 5.0, t);
    let t = time(|| gradient(&mut cx, &BatchNormGrad { dy: None, x, mask: Mask::FromOutput(y), gamma: Some(&gamma), mean: &mean, inv_std: &inv, ceiling: f32::INFINITY }, GradOutput { dx, dgamma: Some(&mut dg), dbeta: &mut db, dresidual: Some(dy) }));
    report("grad+res", 7.0, t);
    let t = time(|| elementwise::add(&mut cx, None, x, y));
    report("add", 3.0, t);
    let t = time(|| elementwise::unary(&cx, Unary::Relu, Some(x), y));
    report("relu", 2.0, t);
    let t = time(|| reduce::sum_leading(&mut cx, x, &mut dg));
    report("sum", 1.0, t);
    let t = time(|| dropout::dropout(&cx, Some(x), (0.5, 7), y));
    report("dropout", 2.0, t);
    println!();
}
fn pools<E: Float>(name: &str, pool: &Pool, isa: Isa) {
    let h = |i: usize| ((i as u32).wrapping_mul(2654435761) >> 8) as f32 / 8388608.0 - 1.0;
    let mut scratch = Scratch::new();
    let cx = Context { pool, isa, scratch: &mut scratch };
    for (kind, k, s, shape) in [(PoolKind::Max, 3, 2, [32, 64, 64, 64]), (PoolKind::Average, 3, 1, [32, 35, 35, 288]), (PoolKind::Max, 2, 2, [32, 64, 64, 128])] {
        let p = Pooling::new(&Pool2d { kind, windows: Windows::Sliding { kernel: [k, k], stride: [s, s], padding: Padding::all(if k == 3 { 1 } else { 0 }), ceil: false, count_padding: true } }, shape);
        let [hh, ww] = p_out(k, s, shape);
        let (n, m) = (shape.iter().product::<usize>(), shape[0] * hh * ww * shape[3]);
        let (x, y) = (take::<E>(n, h), take::<E>(m, h));
        let mut arg = vec![0i32; m];
        let f = time(|| pooling::forward(&cx, &p, x, y, (kind == PoolKind::Max).then_some(&mut arg[..])));
        let g = time(|| pooling::gradient(&cx, &p, y, (kind == PoolKind::Max).then_some(&arg[..]), x));
        println!("{name} pool {kind:?} {k}/{s} {shape:?}: forward {:.2}ms gradient {:.2}ms", f * 1e3, g * 1e3);
    }
}
fn p_out(k: usize, s: usize, shape: [usize; 4]) -> [usize; 2] { let pad = if k == 3 { 2 } else { 0 }; [(shape[1] + pad - k) / s + 1, (shape[2] + pad - k) / s + 1] }
fn main() {
    if std::env::args().nth(1).as_deref() == Some("small") {
        let pool = Pool::new(1);
        for (rows, c) in [(256, 256), (1024, 64)] { run::<f32>("f32 ", rows, c, &pool, Isa::best()); run::<Bf16>("bf16", rows, c, &pool, Isa::best()); }
        return;
    }
    let pool = Pool::new(2);
    if std::env::args().nth(1).as_deref() == Some("big") {
        for (rows, c) in [(32 * 32 * 32, 256), (32 * 64 * 64, 64)] { run::<f32>("f32 ", rows, c, &pool, Isa::best()); run::<Bf16>("bf16", rows, c, &pool, Isa::best()); }
        return;
    }
    for (rows, c) in [(32 * 32 * 32, 256), (32 * 64 * 64, 64), (32 * 16 * 16, 512), (32 * 8 * 8, 256), (512, 2048)] {
        run::<f32>("f32 ", rows, c, &pool, Isa::best());
        run::<Bf16>("bf16", rows, c, &pool, Isa::best());
    }
    pools::<f32>("f32 ", &pool, Isa::best());
    pools::<Bf16>("bf16", &pool, Isa::best());
}
