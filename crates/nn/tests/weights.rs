//! Weights files: what is written comes back, what PyTorch wrote loads, what does not fit is refused with a reason.

#[path = "support/python.rs"]
mod python;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use paceline_nn::layer::{Conv, Window};
use paceline_nn::weights::{self, Inventory, Loaded, Slot, WeightsError};
use paceline_nn::{Input, Mode, Net, Network, zoo};
use paceline_system::disk::Disk;
use paceline_tensor::{GraphError, Value};
use proptest::prelude::*;

/// As `torch.nn.Sequential(Conv2d(3, 8, 3), BatchNorm2d(8), ReLU(), MaxPool2d(2), Flatten(), Linear(72, classes))`.
fn small(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("0", x, Conv::new(8, 3))?;
    let x = net.batch_norm("1", x)?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.flatten(x)?;
    net.linear("5", x, classes)
}

fn network(classes: usize) -> Network {
    Network::new(&small, Mode::Eval, 1, Input::Image { size: [8, 8], channels: 3 }, classes, 0.0).unwrap()
}

fn inventory(network: &Network) -> Inventory<'_> {
    Inventory { parameters: &network.parameters, states: &network.states }
}

fn start(network: &Network, slot: Slot) -> Cow<'static, [f32]> {
    match slot {
        Slot::Parameter(index) => {
            let parameter = &network.parameters[index];
            let mut data = vec![0.0; parameter.shape.elements()];
            parameter.init.fill(7, &parameter.name, &parameter.shape, &mut data);
            data.into()
        }
        Slot::State(index) => vec![index as f32 + 0.5; network.states[index].shape.elements()].into(),
    }
}

fn write(network: &Network, path: &Path) {
    let metadata = BTreeMap::from([("model".to_owned(), "small".to_owned())]);
    weights::write(&Disk::real(), path, inventory(network), &|slot| start(network, slot), &metadata).unwrap();
}

fn read(network: &Network, path: &Path, except: &[&str]) -> Result<Loaded, WeightsError> {
    weights::read(&Disk::real(), path, inventory(network), except)
}

#[test]
fn what_is_written_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let network = network(10);
    write(&network, &path);
    let loaded = read(&network, &path, &[]).unwrap();
    for (index, found) in loaded.parameters.iter().enumerate() {
        assert_eq!(found.as_deref(), Some(&*start(&network, Slot::Parameter(index))));
    }
    for (index, found) in loaded.states.iter().enumerate() {
        assert_eq!(found.as_deref(), Some(&*start(&network, Slot::State(index))));
    }
    assert_eq!(loaded.metadata["model"], "small");
    assert_eq!(weights::read_metadata(&Disk::real(), &path).unwrap(), loaded.metadata);
    assert!(loaded.left_out.is_empty());
    let first = Disk::real().read(&path).unwrap();
    write(&network, &path);
    assert_eq!(Disk::real().read(&path).unwrap(), first, "equal weights are equal files");
}

#[test]
fn another_class_count_is_refused_unless_the_classifier_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    write(&network(1000), &path);
    let ten = network(10);
    let error = read(&ten, &path, &[]).unwrap_err().to_string();
    assert!(
        error.contains("2 of another shape: 5.weight (1000×72 in the file, 10×72 in the model), 5.bias"),
        "{error}"
    );
    let loaded = read(&ten, &path, &["5."]).unwrap();
    assert_eq!(loaded.left_out, ["5.weight", "5.bias"]);
    assert_eq!(loaded.parameters.iter().filter(|parameter| parameter.is_none()).count(), 2);
    assert!(loaded.states.iter().all(Option::is_some));
    let error = read(&ten, &path, &["fc"]).unwrap_err().to_string();
    assert!(error.contains("starts with `fc`"), "{error}");
}

#[test]
fn a_refusal_lists_ten_names_and_then_counts() {
    let deep = |net: &mut Net, x: Value, classes: usize| {
        let mut x = net.flatten(x)?;
        for layer in 0..12 {
            x = net.linear(&format!("deep{layer}"), x, 4)?;
        }
        net.linear("last", x, classes)
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    write(&network(10), &path);
    let deep = Network::new(&deep, Mode::Eval, 1, Input::Image { size: [8, 8], channels: 3 }, 10, 0.0).unwrap();
    let error = read(&deep, &path, &[]).unwrap_err().to_string();
    assert!(error.contains("26 missing from the file: deep0.weight, deep0.bias"), "{error}");
    assert!(error.contains("deep4.bias, and 16 more"), "{error}");
    assert!(error.contains("8 not in the model: 0.bias, 0.weight, 1.bias"), "{error}");
}

#[test]
fn a_full_disk_leaves_the_weights_that_were_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let network = network(10);
    write(&network, &path);
    let before = Disk::real().read(&path).unwrap();
    let disk = Disk::full_after(2000);
    let error = weights::write(&disk, &path, inventory(&network), &|slot| start(&network, slot), &BTreeMap::new());
    assert!(matches!(error, Err(WeightsError::Disk(error)) if error.is_full()) && disk.was_full());
    assert_eq!(Disk::real().read(&path).unwrap(), before);
}

#[test]
fn a_damaged_file_is_refused_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let network = network(2);
    write(&network, &path);
    let whole = Disk::real().read(&path).unwrap();
    for length in (0..whole.len()).step_by(97) {
        Disk::real().write(&path, &whole[..length]).unwrap();
        let error = read(&network, &path, &[]).unwrap_err();
        assert!(matches!(error, WeightsError::NotSafetensors { .. }), "{length}: {error}");
    }
}

/// A file with this header and so many bytes of data.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn hostile_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let huge = u64::MAX;
    let cases = [
        with_header(&format!(r#"{{"0.bias":{{"dtype":"F32","shape":[{huge},{huge}],"data_offsets":[0,8]}}}}"#), 8),
        with_header(&format!(r#"{{"0.bias":{{"dtype":"F32","shape":[2],"data_offsets":[0,{huge}]}}}}"#), 8),
        with_header(r#"{"0.bias":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, 8),
        with_header(r#"{"0.bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#, 8),
        with_header(r#"{"0.bias":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}"#, 8),
        u64::MAX.to_le_bytes().to_vec(),
        b"PK\x03\x04 a zip file, as torch.save writes".to_vec(),
    ];
    for bytes in cases {
        Disk::real().write(&path, &bytes).unwrap();
        let error = read(&network(2), &path, &[]).unwrap_err();
        assert!(matches!(error, WeightsError::NotSafetensors { .. }), "{error}");
    }
    Disk::real().write(&path, &with_header("{}", 0)).unwrap();
    assert!(matches!(read(&network(2), &path, &[]), Err(WeightsError::Mismatch { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), prefix in 0..200u64) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let framed = [&prefix.to_le_bytes()[..], &bytes].concat();
        for bytes in [bytes, framed] {
            Disk::real().write(&path, &bytes).unwrap();
            prop_assert!(read(&network(2), &path, &[]).is_err());
        }
    }

    #[test]
    fn a_flipped_byte_of_the_header_never_panics(position in 0..600usize, byte in any::<u8>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let network = network(2);
        write(&network, &path);
        let mut bytes = Disk::real().read(&path).unwrap();
        bytes[position] = byte;
        Disk::real().write(&path, &bytes).unwrap();
        // A byte may change to itself or within the metadata, so the load may also succeed.
        let _ = read(&network, &path, &[]);
    }
}

#[test]
fn pytorch_loads_what_is_written_and_its_own_file_loads_here() {
    let test = "pytorch_loads_what_is_written_and_its_own_file_loads_here";
    let Some(python) = python::with(test, &["torch", "safetensors"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours.safetensors"), folder.path().join("theirs.safetensors"));
    let network = network(10);
    write(&network, &ours);
    let script = r#"
import sys, torch, safetensors.torch as st
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
model.load_state_dict(st.load_file(sys.argv[1]), strict=True)
print(model[0].weight[5, 2, 0, 1].item(), model[5].weight[3, 9 * 4 + 7].item(), model[1].running_var[3].item())
half = {"module." + name: value if value.dtype == torch.int64 else value.half() for name, value in model.state_dict().items()}
st.save_file(half, sys.argv[2])
"#;
    let printed = python::run(&python, script, &[&ours, &theirs]);
    let found: Vec<f32> = printed.split_whitespace().map(|number| number.parse().unwrap()).collect();
    // Weight [o=5, i=2, kh=0, kw=1] is at [0, 1, 2, 5] here; input c=4, pixel 7 of 3×3 is at 7·8+4.
    let conv = start(&network, Slot::Parameter(0))[(3 + 2) * 8 + 5];
    let linear = start(&network, Slot::Parameter(4))[3 * 72 + 7 * 8 + 4];
    assert_eq!(found, [conv, linear, 1.5]);
    let loaded = read(&network, &theirs, &[]).unwrap();
    let halved = loaded.parameters[0].as_ref().unwrap()[(3 + 2) * 8 + 5];
    assert!((halved - conv).abs() <= conv.abs() / 1024.0, "{halved} is not {conv} in half precision");
}

#[test]
fn torchvision_loads_a_resnet18_written_here() {
    let test = "torchvision_loads_a_resnet18_written_here";
    let Some(python) = python::with(test, &["torch", "torchvision", "safetensors"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("resnet18.safetensors");
    let input = Input::Image { size: [64, 64], channels: 3 };
    let network = Network::new(zoo::find("resnet18").unwrap(), Mode::Eval, 1, input, 1000, 0.0).unwrap();
    write(&network, &path);
    // Each element times its place modulo 1009, in PyTorch's order: a transposed tensor gives another sum.
    let script = r#"
import sys, torch, torchvision, safetensors.torch as st
model = torchvision.models.resnet18()
model.load_state_dict(st.load_file(sys.argv[1]), strict=True)
for name, value in model.state_dict().items():
    if "num_batches" not in name:
        flat = value.double().flatten()
        print(name, float((flat * (torch.arange(len(flat)) % 1009)).sum()))
"#;
    let printed = python::run(&python, script, &[&path]);
    let found: BTreeMap<&str, f64> = printed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, sum)| (name, sum.parse().unwrap()))
        .collect();
    let parameters = network.parameters.iter().enumerate().map(|(index, parameter)| {
        let native = start(&network, Slot::Parameter(index));
        (&parameter.name, parameter.layout.to_foreign(&parameter.shape, &native))
    });
    let states = network.states.iter().enumerate();
    let states = states.map(|(index, state)| (&state.name, start(&network, Slot::State(index)).into_owned()));
    let mut compared = 0;
    for (name, elements) in parameters.chain(states) {
        let expected: f64 = elements.iter().enumerate().map(|(index, &x)| f64::from(x) * (index % 1009) as f64).sum();
        let found = found[name.as_str()];
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1e6), "{name}: {found} is not {expected}");
        compared += 1;
    }
    assert_eq!((compared, found.len()), (102, 102));
}
