//! Bad input: exit code 2, a sentence that says what to type, and not one file changed.

use crate::place::{Place, QUICK};

#[test]
fn names_that_do_not_exist_are_answered_with_names_that_do() {
    let place = Place::new();
    for (arguments, words) in [
        ("train --model resnet5", ["resnet50", "paceline models"]),
        ("plan --model vgg17", ["vgg16", "paceline models"]),
        ("bench step --model lenet", ["lenet5", "paceline models"]),
        ("train --data imagenet", ["shapes", "cifar10:DIR"]),
        ("train --optimizer adamx", ["adamw", "one of"]),
        ("train --schedule linear", ["cosine", "type"]),
        ("train --augment lots", ["flip", "standard"]),
        ("bench step --dtype f8", ["f8", "type f32 or bf16"]),
        ("train --device gpu", ["gpu", "type cpu, cuda or cuda:1"]),
        ("trian", ["train", "similar"]),
        ("train --modle mlp", ["--model", "similar"]),
    ] {
        place.refuses(arguments, &words);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    if paceline::tensor::device::cuda::count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: a_gpu_that_is_not_there_is_refused needs a machine without a GPU");
        return;
    }
    let place = Place::new();
    for arguments in
        ["train --device cuda", "bench step --model resnet20 --device cuda", "train --device cuda --workers 2"]
    {
        place.refuses(arguments, &["GPU"]);
    }
}

#[test]
fn gpus_that_cannot_train_together_are_refused_before_anything_starts() {
    let place = Place::new();
    for (arguments, words) in [
        ("train --carry nccl", ["--carry nccl is for GPUs", "type --device cuda"]),
        (
            "train --device cuda --workers 2 --carry nccl --sync-batch-norm",
            ["--sync-batch-norm needs", "leave --carry out"],
        ),
        ("train --device cuda --carry nccl --squeeze bf16", ["--squeeze bf16 needs", "leave --carry out"]),
        ("train --device cuda:1 --workers 2", ["--device cuda:1 is one GPU", "type --device cuda,"]),
    ] {
        place.refuses(arguments, &words);
    }
}

#[test]
fn data_that_is_not_there_or_not_whole_is_refused() {
    let place = Place::new();
    for number in 1..=5 {
        place.write(&format!("cifar/data_batch_{number}.bin"), [0; 3073 * 2]);
    }
    place.write("cifar/test_batch.bin", [0; 3073 * 2]);
    place.write("short.txt", "short");
    place.write("photos/train/cat/one.txt", "no image");
    place.write("photos/val/cat/one.txt", "no image");
    for (data, words) in [
        ("cifar10:nowhere", ["no cifar10 data in ", "type --data cifar10:DIR"]),
        ("cifar10", ["no folder was given", "type --data cifar10:DIR"]),
        ("cifar10:cifar", ["data_batch_1.bin", "truncated"]),
        ("mnist:nowhere", ["no mnist data", "type --data mnist:DIR"]),
        ("folder:nowhere", ["train/CLASS/*.jpg", "type --data folder:DIR"]),
        ("folder:photos", ["has no .jpg", "add some"]),
        ("text:nowhere.txt", ["nowhere.txt", "text:FILE"]),
        ("text:short.txt", ["too few", "type --data text:FILE"]),
        ("synthetic:8x8", ["type for example", "synthetic:224x224x3/1000"]),
        ("shapes:here", ["built in", "type --data shapes"]),
    ] {
        place.refuses(&format!("train --model mlp --data {data}"), &words);
        place.refuses(&format!("data inspect {data}"), &words[..1]);
    }
}

#[test]
fn models_and_data_that_do_not_go_together_are_refused() {
    let place = Place::new();
    place.write("long.txt", "to be or not to be, that is the question. ".repeat(40));
    for (arguments, words) in [
        ("--model mlp --data synthetic:8x8x3/10/64 --batch 8 --classes 5", ["has 10 classes", "type --classes 10"]),
        (
            "--model mlp --data synthetic:8x8x3/10/64 --batch 65 --last-batch drop",
            ["64 samples", "type --batch 64 or smaller"],
        ),
        ("--model alexnet --data shapes --size 32", ["at least 63×63", "type --size 63"]),
        ("--model gpt --data shapes", ["gpt reads text", "type --data text:FILE"]),
        ("--model lenet5 --data text:long.txt --sequence 8", ["reads images", "type --model lstm or --model gpt"]),
        ("--model mlp --data shapes --batch 3 --accumulate 4", ["cut into 4 parts", "type --accumulate 3 or less"]),
        ("--model mlp --data shapes --size 9000", ["too large", "type --size"]),
        ("--model vgg16 --data shapes --size 2048 --batch 4096", ["GB of memory", "type --batch "]),
        ("--model mlp --data shapes --momentum 1", ["momentum", "from 0 to below 1"]),
        ("--model mlp --data shapes --label-smoothing 1", ["from 0 to below 1", "type for example"]),
    ] {
        place.refuses(&format!("train {arguments}"), &words);
    }
}

#[test]
fn numbers_that_cannot_work_are_refused_for_every_flag() {
    let place = Place::new();
    let counts = "size sequence classes batch accumulate epochs max-steps early-stop threads loader-threads \
                  checkpoint-every keep";
    let from_zero = "damaged-max seed warmup-epochs momentum weight-decay label-smoothing";
    for flag in counts.split_whitespace().chain(["lr", "clip-norm", "time-limit"]) {
        for value in ["0", "-1", "x", "1e999"] {
            place.refuses(
                &format!("train {QUICK} --{flag} {value}").replace("--batch 8 --batch", "--batch"),
                &[&format!("--{flag}"), "type "],
            );
        }
    }
    for flag in from_zero.split_whitespace() {
        for value in ["-1", "x"] {
            place.refuses(&format!("train {QUICK} --{flag} {value}"), &[&format!("--{flag}"), "type "]);
        }
    }
    for (command, flags) in [
        ("plan", "batch size classes"),
        ("bench step", "batch size classes steps threads"),
        ("bench kernels", "batch size classes seconds threads"),
        ("predict run image.png", "top"),
    ] {
        for (flag, value) in flags.split_whitespace().flat_map(|flag| [(flag, "0"), (flag, "-1")]) {
            place.refuses(&format!("{command} --{flag} {value}"), &[&format!("--{flag}"), "type "]);
        }
    }
}

#[test]
fn a_run_folder_that_cannot_be_written_is_refused() {
    let place = Place::new();
    place.write("file", "");
    for run in ["file/run", "file", "/proc/paceline-test"] {
        place.refuses(&format!("train {QUICK} --run {run}"), &["type --run with a folder that can be written"]);
    }
}

#[test]
fn a_run_is_never_written_over() {
    let place = Place::with_run();
    place.refuses(&format!("train {QUICK} --run run"), &["already holds a run", "--resume run", "another --run"]);
    place.refuses("train --resume run", &["this run is done (8 steps)", "--epochs"]);
    place.refuses("train --resume run --epochs 2 --batch 16", &["--batch cannot change", "--weights run"]);
    place.refuses("train --resume run --model lenet5", &["--model", "--resume"]);
    place.refuses("export run --onnx run/config.toml", &["is there already", "--force"]);
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let place = Place::with_run();
    let config = place.read_text("run/config.toml").replace("\"mlp\"", "\"resnet9\"");
    place.write("run/config.toml", config.replace("epochs = 1", "epochs = 2"));
    place.refuses("train --resume run", &["step-00000008", "config.toml names", "another --run"]);
    place.refuses("evaluate run", &["weights of mlp", "config.toml names resnet9"]);
}

#[test]
fn weights_that_do_not_fit_are_refused_with_the_differences() {
    let place = Place::with_run();
    place.write("garbage.safetensors", "this is not a safetensors file at all");
    let other = "train --model mlp --data synthetic:8x8x3/5/64 --batch 8";
    place.refuses(&format!("{other} --weights run"), &["fc3.weight (10×512 in the file, 5×512", "--except fc3"]);
    place.refuses(&format!("{other} --weights run --except fc9"), &["starts with `fc9`", "such as `fc`"]);
    place.refuses(&format!("{other} --weights garbage.safetensors"), &["not a safetensors file", "save_file"]);
    place.refuses(&format!("{other} --weights nowhere"), &["no weights at /", "type a run's folder"]);
    place.refuses(
        "train --model resnet9 --data synthetic:32x32x3/10/64 --batch 8 --weights run",
        &["missing from the file", "not in the model: fc1.bias"],
    );
    place.run(&format!("{other} --weights run --except fc3 --epochs 1 --run other --quiet"));
}

#[test]
fn configurations_that_do_not_fit_are_refused_by_line() {
    let place = Place::new();
    place.write("typo.toml", "model = \"mlp\"\nepoch = 3\n");
    place.write("zero.toml", "model = \"mlp\"\nbatch = 0\n");
    place.write("word.toml", "epochs = \"many\"\n");
    place.refuses("train typo.toml", &["typo.toml", "line 2", "unknown field `epoch`", "`epochs`"]);
    place.refuses("train zero.toml", &["--batch 0 does not work", "type --batch"]);
    place.refuses("train word.toml", &["line 1", "invalid type"]);
    place.refuses("train nowhere.toml", &["cannot read nowhere.toml", "recipes/"]);
}

#[test]
fn folders_and_files_that_hold_no_run_are_refused() {
    let place = Place::with_run();
    place.write("empty/readme.txt", "nothing here");
    place.write("picture.png", "no picture");
    place.refuses("train --resume empty", &["holds no run", "type the folder"]);
    place.refuses("train --resume nowhere", &["holds no run", "type the folder"]);
    place.refuses("evaluate empty", &["no weights at empty", "type a run's folder"]);
    place.refuses("export empty --onnx model.onnx", &["no weights at empty", "type a run's folder"]);
    place.refuses("predict empty picture.png", &["no weights at empty", "type a run's folder"]);
    place.refuses("report empty", &["is not a run", "paceline train"]);
    place.refuses("predict run picture.png", &["picture.png is not a JPEG or PNG image"]);
    place.refuses("predict run nowhere.png", &["cannot read nowhere.png"]);
    place.refuses("predict run/config.toml picture.png", &["is not a safetensors file"]);
}
