//! Exported networks against onnxruntime: the same logits from the same weights and inputs.
//!
//! Each network is exported at a batch of 2 and run at a batch of 3, which proves that the batch stayed open.

#[path = "support/python.rs"]
mod python;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use paceline_nn::layer::{Conv, Norm, Window};
use paceline_nn::onnx::{self, ExportError};
use paceline_nn::weights::Slot;
use paceline_nn::{ForeignLayout, Init, Input, Mode, Model, Net, Network, Parameter, zoo};
use paceline_system::random::Random;
use paceline_tensor::fuse::fuse;
use paceline_tensor::window::{Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{DType, Device, Executor, Graph, GraphError, Op, Pass, Plan, Shape, Store, Unary, Value, Wanted};

const EXPORTED_BATCH: usize = 2;
const RUN_BATCH: usize = 3;

/// Loads every folder's model, checks it, runs it on x.bin and prints the folder's name, the largest difference
/// from logits.bin and the largest logit.
const SCRIPT: &str = r#"
import sys, pathlib, numpy, onnx, onnxruntime
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    onnx.checker.check_model(onnx.load(folder / "model.onnx"), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    x, = session.get_inputs()
    assert x.name == "x" and x.shape[0] == "N", (x.name, x.shape)
    kind = numpy.int64 if x.type == "tensor(int64)" else numpy.float32
    data = numpy.fromfile(folder / "x.bin", dtype=kind).reshape([3, *x.shape[1:]])
    logits, = session.run(["logits"], {"x": data})
    expected = numpy.fromfile(folder / "logits.bin", dtype=numpy.float32).reshape(logits.shape)
    print(folder.name, abs(logits - expected).max(), abs(expected).max())
"#;

fn parameter(network: &Network, index: usize) -> Vec<f32> {
    let parameter = &network.parameters[index];
    let mut data = vec![0.0; parameter.shape.elements()];
    parameter.init.fill(3, &parameter.name, &parameter.shape, &mut data);
    // Scales and shifts away from 1 and 0, so that a lost one shows.
    if parameter.shape.len() == 1 {
        let mut random = Random::new(&[5, index as u64]);
        data.iter_mut().for_each(|x| *x += random.range(0.0, 0.3));
    }
    data
}

fn state(network: &Network, index: usize) -> Vec<f32> {
    let mut random = Random::new(&[6, index as u64]);
    let state = &network.states[index];
    (0..state.shape.elements()).map(|_| state.start + random.range(0.0, 0.5)).collect()
}

fn values<'a>(network: &'a Network) -> impl Fn(Slot) -> Cow<'a, [f32]> {
    move |slot| match slot {
        Slot::Parameter(index) => parameter(network, index).into(),
        Slot::State(index) => state(network, index).into(),
    }
}

/// Writes the model, an input in ONNX' layout, and the engine's own logits.
fn write_case(folder: &Path, model: &dyn Model, input: Input, classes: usize) {
    write_networks(folder, &|batch| Network::new(model, Mode::Eval, batch, input, classes, 0.0).unwrap(), classes);
}

fn write_networks(folder: &Path, build: &dyn Fn(usize) -> Network, classes: usize) {
    std::fs::create_dir(folder).unwrap();
    let exported = build(EXPORTED_BATCH);
    let bytes = onnx::export(&exported, &values(&exported), &BTreeMap::new()).unwrap();
    std::fs::write(folder.join("model.onnx"), bytes).unwrap();

    let network = build(RUN_BATCH);
    let wanted = Wanted { outputs: vec![network.logits], ..Wanted::default() };
    let plan = Plan::new(network.graph.clone(), &wanted);
    let mut store = Store::new(&plan);
    (0..network.parameters.len()).for_each(|i| store.parameter_mut(i).copy_from_slice(&parameter(&network, i)));
    (0..network.states.len()).for_each(|i| store.state_mut(i).copy_from_slice(&state(&network, i)));
    let mut executor = Executor::new(&Device::cpu(2), plan).unwrap();
    let mut random = Random::new(&[9]);
    let shape = network.graph.shape(network.x).clone();
    let x_bytes: Vec<u8> = match network.graph.dtype(network.x) {
        DType::I32 => {
            let tokens: Vec<i32> = (0..shape.elements()).map(|_| random.below(classes) as i32).collect();
            executor.write(network.x, &tokens).unwrap();
            tokens.iter().flat_map(|&token| i64::from(token).to_le_bytes()).collect()
        }
        _ => {
            let x: Vec<f32> = (0..shape.elements()).map(|_| random.normal()).collect();
            executor.write(network.x, &x).unwrap();
            channels_first(&shape, &x).iter().flat_map(|x| x.to_le_bytes()).collect()
        }
    };
    executor.run(&mut store, Pass::default()).unwrap();
    let logits: Vec<u8> = executor.read::<f32>(network.logits).unwrap().iter().flat_map(|x| x.to_le_bytes()).collect();
    std::fs::write(folder.join("x.bin"), x_bytes).unwrap();
    std::fs::write(folder.join("logits.bin"), logits).unwrap();
}

fn channels_first(shape: &Shape, x: &[f32]) -> Vec<f32> {
    let [batch, height, width, channels] = shape.nhwc().unwrap();
    let pixels = height * width;
    let mut y = vec![0.0; x.len()];
    for n in 0..batch {
        for pixel in 0..pixels {
            for c in 0..channels {
                y[(n * channels + c) * pixels + pixel] = x[(n * pixels + pixel) * channels + c];
            }
        }
    }
    y
}

/// Runs the folders' models in onnxruntime and holds their logits to the engine's.
fn compare(python: &std::path::PathBuf, folder: &Path, cases: usize) {
    let printed = python::run(python, SCRIPT, &[folder]);
    assert_eq!(printed.lines().count(), cases, "{printed}");
    for line in printed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (apart, largest): (f32, f32) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        assert!(largest > 1e-3 && apart <= 2e-4 * largest, "{line}");
    }
}

fn strange_windows(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let uneven = Padding { top: 0, left: 2, bottom: 3, right: 1 };
    let x = net.conv("asymmetric", x, Conv::rectangular(12, [3, 2]).padding(uneven).stride(2))?;
    let x = net.unary(x, Unary::Relu6)?;
    let x = net.conv("grouped", x, Conv::new(24, 3).same().groups(3).no_bias())?;
    let x = net.batch_norm_with("unscaled", x, Norm { scale: false, ..Norm::KERAS })?;
    let x = net.conv("depthwise", x, Conv::new(24, 3).pad(2).dilation(2).groups(24))?;
    let a = net.max_pool(x, Window::new(3).stride(2).ceil())?;
    let b = net.average_pool(x, Window::new(3).stride(2).ceil())?;
    let c = net.average_pool(x, Window::new(3).stride(2).pad(1).ceil().real_pixels())?;
    let c = net.adaptive_average_pool(c, [net.shape(a)[1], net.shape(a)[2]])?;
    let d = net.average_pool(x, Window::new(3).stride(2).pad(1).ceil())?;
    let d = net.slice(d, 1, 0, net.shape(a)[1])?;
    let d = net.slice(d, 2, 0, net.shape(a)[2])?;
    let x = net.concat(&[a, b, c, d])?;
    let x = net.slice(x, 3, 5, 80)?;
    let x = net.zero_pad(x, Padding { top: 1, left: 0, bottom: 2, right: 3 })?;
    let x = net.max_pool(x, Window::new(3).stride(2))?;
    let x = net.average_pool(x, Window::new(2).same().stride(1))?;
    let x = net.adaptive_average_pool(x, [5, 2])?;
    let x = net.flatten(x)?;
    net.linear("fc", x, classes)
}

fn strange_layouts(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let [batch, height, width] = [0, 1, 2].map(|dim| net.shape(x)[dim]);
    let x = net.conv("conv", x, Conv::new(8, 3).same())?;
    let channel = net.learned("channel", [8], Init::Normal(1.0));
    let row = net.learned("row", [width, 8], Init::Normal(1.0));
    let x = net.mul(x, channel)?;
    let by_row = net.add(x, row)?;
    let sum = net.add(x, by_row)?;
    let other = net.unary(by_row, Unary::Gelu)?;
    let x = net.concat(&[other, sum])?;
    let x = net.layer_norm("norm", x)?;
    let x = net.batch_norm("batch_norm4", x)?;
    let x = net.unary(x, Unary::GeluTanh)?;
    let turned = net.permute(x, &[0, 3, 1, 2])?;
    let product = net.matmul(turned, turned, true)?;
    let product = net.softmax(product, true)?;
    let x = net.matmul(product, turned, false)?;
    let x = net.permute(x, &[0, 2, 3, 1])?;
    let x = net.conv("again", x, Conv::new(4, 1))?;
    let x = net.unary(x, Unary::Sigmoid)?;
    let x = net.reshape(x, [batch, height * width, 4])?;
    let x = net.batch_norm("batch_norm3", x)?;
    let x = net.lstm("lstm", 0, x, 6)?;
    let x = net.permute(x, &[1, 0, 2])?;
    let x = net.unary(x, Unary::Tanh)?;
    let x = net.scale(x, 3.0)?;
    let x = net.permute(x, &[1, 2, 0])?;
    let x = net.flatten(x)?;
    let x = net.batch_norm("batch_norm2", x)?;
    net.linear("fc", x, classes)
}

/// Operations that no layer makes by itself: turned operands, a bias and a ReLU on batched products, maxima over uneven
/// windows, a sum over leading dims.
fn by_hand(batch: usize) -> Network {
    let mut graph = Graph::new();
    let x = graph.input("x", [batch, 7, 6, 3], DType::F32);
    let mut parameters = Vec::new();
    let mut parameter = |graph: &mut Graph, name: &str, shape: Shape| {
        let (init, layout) = (Init::Normal(0.5), ForeignLayout::Same);
        parameters.push(Parameter { name: name.into(), shape: shape.clone(), init, decay: true, layout });
        graph.parameter(name, shape)
    };
    let bias = parameter(&mut graph, "bias", [3].into());
    let rows = parameter(&mut graph, "rows", [4, 3].into());
    let weight = parameter(&mut graph, "weight", [9, 7].into());
    let mut push = |op: Op, inputs: &[Value]| graph.push_one("by_hand", op, inputs).unwrap();
    let pool = Pool2d { kind: PoolKind::Max, windows: Windows::Adaptive { output: [4, 5] } };
    let y = push(Op::Pool2d(pool), &[x]);
    let y = push(Op::Reshape([batch, 20, 3].into()), &[y]);
    let y = push(Op::MatMul { trans_a: true, trans_b: false, bias: true, relu: true }, &[y, y, bias]);
    let sum = push(Op::SumLeading { suffix: [3].into() }, &[rows]);
    let y = push(Op::Add, &[y, sum]);
    let y = push(Op::Reshape([batch, 9].into()), &[y]);
    let logits = push(Op::MatMul { trans_a: false, trans_b: false, bias: false, relu: false }, &[y, weight]);
    let targets = graph.input("targets", [batch], DType::I32);
    let loss = graph.push_one("loss", Op::CrossEntropy { smoothing: 0.0 }, &[logits, targets]).unwrap();
    Network { graph, parameters, states: Vec::new(), x, targets, logits, loss, gradients: None }
}

/// Residuals and ReLUs inside batch normalisations, convolutions and products.
fn fused(batch: usize) -> Network {
    let input = Input::Image { size: [32, 32], channels: 3 };
    let mut network = Network::new(zoo::find("resnet20").unwrap(), Mode::Eval, batch, input, 10, 0.0).unwrap();
    network.graph = fuse(network.graph, &[network.logits]);
    assert!(network.graph.nodes().iter().any(|node| matches!(&node.op, Op::BatchNormInference(norm) if norm.residual)));
    network
}

#[test]
fn strange_windows_and_layouts_give_the_same_logits_in_onnxruntime() {
    let test = "strange_windows_and_layouts_give_the_same_logits_in_onnxruntime";
    let Some(python) = python::with(test, &["onnxruntime", "onnx", "numpy"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    write_case(&folder.path().join("windows"), &strange_windows, Input::Image { size: [29, 22], channels: 3 }, 7);
    write_case(&folder.path().join("layouts"), &strange_layouts, Input::Image { size: [6, 6], channels: 3 }, 7);
    write_networks(&folder.path().join("by_hand"), &by_hand, 7);
    write_networks(&folder.path().join("fused"), &fused, 10);
    compare(&python, folder.path(), 4);
}

#[test]
fn models_of_the_zoo_give_the_same_logits_in_onnxruntime() {
    let test = "models_of_the_zoo_give_the_same_logits_in_onnxruntime";
    let Some(python) = python::with(test, &["onnxruntime", "onnx", "numpy"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    // One of each family that is quick to start; together they use every operation of the zoo.
    let names = "mlp lenet5 resnet20 resnet18 resnet50v2 googlenet inceptionv3 mobilenet xception lstm gpt";
    for name in names.split(' ') {
        let entry = zoo::find(name).unwrap();
        let input = match entry.native {
            Input::Image { channels, .. } => Input::Image { size: [entry.smallest; 2], channels },
            Input::Tokens { .. } => Input::Tokens { sequence: 12 },
        };
        write_case(&folder.path().join(name), entry, input, 11);
    }
    compare(&python, folder.path(), names.split(' ').count());
}

#[test]
fn a_network_for_training_is_refused() {
    let input = Input::Image { size: [32, 32], channels: 3 };
    let network = Network::new(zoo::find("resnet20").unwrap(), Mode::Train, 2, input, 10, 0.0).unwrap();
    let error = onnx::export(&network, &values(&network), &BTreeMap::new()).unwrap_err();
    assert!(matches!(error, ExportError::Training { .. }), "{error}");
    assert!(error.to_string().ends_with("build the network with Mode::Eval to export it"), "{error}");
}

#[test]
fn two_gibibytes_are_refused_before_they_are_copied() {
    let large = |net: &mut Net, x: Value, classes: usize| {
        let x = net.flatten(x)?;
        let x = net.linear("large", x, 1 << 29)?;
        net.linear("fc", x, classes)
    };
    let network = Network::new(&large, Mode::Eval, 1, Input::Image { size: [1, 1], channels: 1 }, 1, 0.0).unwrap();
    let error = onnx::export(&network, &|_| unreachable!("nothing is read"), &BTreeMap::new()).unwrap_err();
    assert!(error.to_string().contains("less than 2 GiB"), "{error}");
}
