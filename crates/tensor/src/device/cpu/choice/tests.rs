//! Calibration changes nothing but the algorithm, finds its choices again, and believes no file.

use paceline_system::disk::Disk;
use proptest::prelude::*;

use std::sync::Arc;

use super::super::conv::conv2d_forward;
use super::super::gemm::Epilogue;
use super::*;
use crate::device::Device;
use crate::execute::{Executor, Pass};
use crate::graph::Graph;
use crate::op::Op;
use crate::plan::Wanted;
use crate::store::Store;
use crate::window::{Conv2d, Padding};

/// One 3×3 convolution of 32 channels, forward only.
fn plan() -> Plan {
    let mut graph = Graph::new();
    let x = graph.input("x", [4, 16, 16, 32], DType::F32);
    let weight = graph.parameter("weight", [3, 3, 32, 32]);
    let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
    let y =
        graph.push_one("conv", Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight]).unwrap();
    Plan::new(graph, &Wanted { outputs: vec![y], ..Wanted::default() })
}

fn shape(plan: &Plan) -> ConvShape {
    match Kernel::all(plan.graph())[..] {
        [(Kernel::Convolution { shape, .. }, _)] => shape,
        _ => panic!("there is one convolution"),
    }
}

#[test]
fn what_was_measured_is_found_again_and_the_rule_holds_elsewhere() {
    let (plan, cpu) = (plan(), Cpu::new(1));
    let shape = shape(&plan);
    assert!(Kernel::all(plan.graph())[0].0.flops() > TINY_FLOPS);
    let by_rule = (shape.algorithm(ConvPass::Forward), false);
    assert_eq!(cpu.algorithm(&shape, ConvPass::Forward, DType::F32), by_rule);

    let mut choices = Choices::new("this one");
    let calibration = cpu.calibrate(&plan, &mut choices, false);
    assert_eq!((calibration.by_rule, calibration.measured, choices.len()), (1, 0, 0));
    let calibration = cpu.calibrate(&plan, &mut choices, true);
    assert_eq!((calibration.known, calibration.measured, choices.len()), (0, 1, 1));
    let measured = cpu.algorithm(&shape, ConvPass::Forward, DType::F32);
    assert!(measured.1 && shape.candidates(ConvPass::Forward).any(|algorithm| algorithm == measured.0));
    assert!(!cpu.algorithm(&shape, ConvPass::GradInput, DType::F32).1, "another pass was not measured");

    let again = Cpu::new(1);
    let calibration = again.calibrate(&plan, &mut choices, true);
    assert_eq!((calibration.known, calibration.measured), (1, 0));
    assert_eq!(again.algorithm(&shape, ConvPass::Forward, DType::F32), measured);
    let calibration = Cpu::new(2).calibrate(&plan, &mut choices, false);
    assert_eq!(calibration.known, 1, "two threads compute what one does");
}

#[test]
fn a_choice_that_is_no_candidate_is_measured_again() {
    let (plan, cpu) = (plan(), Cpu::new(1));
    let key = Key { shape: shape(&plan), pass: ConvPass::Forward, dtype: DType::F32, isa: cpu.isa() };
    let mut choices = Choices::new("this one");
    let wrong = Choice { algorithm: Algorithm::Depthwise, seconds: BTreeMap::new(), threads: 1 };
    choices.choices.insert(key, wrong.clone());
    assert_eq!(cpu.calibrate(&plan, &mut choices, false).by_rule, 1);
    assert_eq!(cpu.calibrate(&plan, &mut choices, true).measured, 1);
    assert_ne!(choices.choices[&key], wrong);
}

#[test]
fn the_rule_holds_unless_another_is_clearly_faster() {
    let choose = |implicit: f64, winograd: f64| {
        let seconds = BTreeMap::from([(Algorithm::Implicit, implicit), (Algorithm::Winograd, winograd)]);
        fastest(&seconds, Algorithm::Winograd)
    };
    assert_eq!(choose(1.0, 1.02), Algorithm::Winograd);
    assert_eq!(choose(1.0, 1.1), Algorithm::Implicit);
    assert_eq!(choose(1.1, 1.0), Algorithm::Winograd);
}

#[test]
fn what_is_not_allowed_is_neither_chosen_nor_measured() {
    let (plan, cpu) = (plan(), Cpu::new(1));
    let shape = shape(&plan);
    let chosen = |dtype: DType| cpu.algorithm(&shape, ConvPass::Forward, dtype).0;
    for (winograd, by_tiles) in
        [(Winograd::Auto, [true; 2]), (Winograd::F32, [true, false]), (Winograd::Off, [false; 2])]
    {
        cpu.hold_to(&plan, |_| Algorithm::Winograd);
        cpu.allow_winograd(winograd);
        assert_eq!([DType::F32, DType::Bf16].map(|dtype| chosen(dtype) == Algorithm::Winograd), by_tiles);
        let mut choices = Choices::new("this one");
        assert_eq!(cpu.calibrate(&plan, &mut choices, true).measured, usize::from(by_tiles[0]));
        assert_eq!(winograd.to_string().parse(), Ok(winograd));
    }
    assert!("on".parse::<Winograd>().unwrap_err().contains("auto, f32 or off"));
}

#[test]
fn the_chosen_algorithm_is_the_one_that_runs() {
    let shape = shape(&plan());
    let numbers = |count: usize| (0..count).map(|index| (index % 97) as f32 / 97.0 - 0.5).collect::<Vec<f32>>();
    let (x, weight) = (numbers(shape.x.iter().product()), numbers(shape.weights()));
    let mut results = Vec::new();
    for algorithm in shape.candidates(ConvPass::Forward) {
        let cpu = Arc::new(Cpu::new(1));
        cpu.chosen.write().unwrap().measured.insert((shape, ConvPass::Forward, DType::F32), algorithm);
        let mut executor = Executor::new(&Device::Cpu(Arc::clone(&cpu)), plan()).unwrap();
        let (input, y) = (executor.plan().graph().inputs()[0], executor.plan().outputs()[0]);
        let mut store = Store::new(executor.plan());
        store.parameter_mut(0).copy_from_slice(&weight);
        executor.write(input, &x).unwrap();
        executor.run(&mut store, Pass::default()).unwrap();
        let mut expected = vec![0.0; shape.y.iter().product()];
        let mut scratch = cpu.scratch.lock().unwrap();
        let mut context = Context { pool: cpu.pool(), isa: cpu.isa(), scratch: &mut scratch };
        conv2d_forward(&mut context, &shape, algorithm, &x, &weight, Epilogue::default(), &mut expected);
        let result = executor.read::<f32>(y).unwrap();
        assert!(result == expected, "{algorithm:?}");
        results.push(result);
    }
    assert!(results.len() == 2 && results[0] != results[1], "two algorithms differ in their last bits");
}

#[test]
fn a_long_batch_is_measured_on_fewer_images() {
    let (kernel, _) = Kernel::all(plan().graph())[0].clone();
    let short = kernel.shortened(kernel.flops() / 2);
    assert_eq!(short.flops(), kernel.flops() / 2);
    assert_eq!(kernel.shortened(1).flops(), kernel.flops() / 4, "one image is the least");
    assert_eq!(kernel.shortened(u64::MAX), kernel);
}

fn measured() -> Choices {
    let mut choices = Choices::new("AMD EPYC (TM)");
    Cpu::new(1).calibrate(&plan(), &mut choices, true);
    choices
}

#[test]
fn a_file_is_read_as_it_was_written() {
    let (folder, choices) = (tempfile::tempdir().unwrap(), measured());
    let deep = folder.path().join("cache/paceline");
    assert!(Choices::load(&Disk::real(), &deep, "AMD EPYC (TM)").unwrap().is_empty());
    choices.save(&Disk::real(), &deep).unwrap();
    assert!(deep.join("choices-amd-epyc-tm.json").exists());
    assert_eq!(Choices::load(&Disk::real(), &deep, "AMD EPYC (TM)").unwrap(), choices);
    assert!(Choices::load(&Disk::real(), &deep, "another").unwrap().is_empty(), "another file");
    Choices::new("AMD EPYC (TM)").save(&Disk::real(), &deep).unwrap();
    assert_eq!(Choices::load(&Disk::real(), &deep, "AMD EPYC (TM)").unwrap(), choices, "nothing is lost");
}

#[test]
fn a_damaged_or_foreign_file_is_refused_and_replaced() {
    let (folder, choices) = (tempfile::tempdir().unwrap(), measured());
    let (disk, path) = (Disk::real(), choices.path(folder.path()));
    let text = choices.to_json();
    let cases = [
        (text[..text.len() / 2].to_owned(), "it is damaged"),
        (text.replace("\"version\":2", "\"version\":0"), "it was measured for version 0"),
        (text.replace("AMD EPYC", "VIA C3"), "it was measured on `VIA C3 (TM)`"),
        (text.replace("forward", "sideways"), "it is damaged"),
    ];
    for (damaged, reason) in cases {
        disk.write(&path, damaged.as_bytes()).unwrap();
        let error = Choices::load(&disk, folder.path(), "AMD EPYC (TM)").unwrap_err().to_string();
        assert!(error.starts_with(reason), "{error}");
        choices.save(&disk, folder.path()).unwrap();
        assert_eq!(disk.read_text(&path).unwrap(), text);
    }
}

proptest! {
    #[test]
    fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        assert!(Choices::from_json(&bytes, "this one").is_err());
    }

    /// Whatever numbers stand in a file, a device that reads it computes what it would without.
    #[test]
    fn no_numbers_are_too_strange(x in any::<[usize; 4]>(), kernel in any::<[usize; 2]>(), threads in any::<usize>()) {
        let (plan, cpu) = (plan(), Cpu::new(1));
        let mut key = Key { shape: shape(&plan), pass: ConvPass::Forward, dtype: DType::F32, isa: cpu.isa() };
        (key.shape.x, key.shape.conv.kernel) = (x, kernel);
        let mut choices = Choices::new("this one");
        choices.choices.insert(key, Choice { algorithm: Algorithm::Pointwise, seconds: BTreeMap::new(), threads });
        let mut read = Choices::from_json(choices.to_json().as_bytes(), "this one").unwrap();
        assert_eq!(read, choices);
        cpu.calibrate(&plan, &mut read, false);
        assert!(!cpu.algorithm(&shape(&plan), ConvPass::Forward, DType::F32).1);
    }
}
