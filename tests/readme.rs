//! Every `paceline` command that README.md shows runs, on data made here, cut to a step.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use paceline::tensor::device::cuda;

/// Commands of the ```sh blocks, without their comments.
fn commands() -> Vec<String> {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let blocks = readme.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let lines = blocks.flat_map(str::lines).filter(|line| line.starts_with("paceline "));
    lines.map(|line| line.split("  #").next().unwrap_or(line).trim().to_owned()).collect()
}

fn paceline(folder: &Path, line: &str) {
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    let output = command.args(&words).current_dir(folder).env("PACELINE_CACHE", folder.join("cache")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`{line}` ended with {:?}: {said}", output.status.code());
}

/// Data of every kind, small: CIFAR-10's files (black images, sparse on disk), a folder of photographs, a text.
fn make_data(folder: &Path) {
    let cifar = folder.join("cifar");
    fs::create_dir_all(&cifar).unwrap();
    let names = (1..=5).map(|number| format!("data_batch_{number}.bin")).chain(["test_batch.bin".to_owned()]);
    for name in names {
        fs::File::create(cifar.join(name)).unwrap().set_len(10_000 * 3073).unwrap();
    }
    for (split, count) in [("train", 40), ("val", 2)] {
        for (class, shade) in [("dark", 60), ("light", 200)] {
            let place = folder.join("photos").join(split).join(class);
            fs::create_dir_all(&place).unwrap();
            for index in 0..count {
                let image = image::RgbImage::from_pixel(40, 40, image::Rgb([shade, shade, index as u8]));
                image.save(place.join(format!("{index}.png"))).unwrap();
            }
        }
    }
    fs::write(folder.join("text.txt"), "to be, or not to be, that is the question: ".repeat(900)).unwrap();
}

/// A short run of a model on the photographs, and its folder.
fn make_run(folder: &Path, model: &str, size: usize) -> PathBuf {
    let run = folder.join(model);
    let run_shown = run.display();
    paceline(
        folder,
        &format!(
            "paceline train --model {model} --data folder:photos --size {size} --batch 4 --max-steps 1 --run {run_shown} --quiet"
        ),
    );
    run
}

#[test]
#[ignore = "cargo x ci: readme"]
fn every_command_of_the_readme_runs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_data(folder);
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    std::os::unix::fs::symlink(recipes, folder.join("recipes")).unwrap();
    let small = make_run(folder, "resnet20", 32);
    let large = make_run(folder, "resnet50", 33);
    let weights = large.join("checkpoints/step-00000001/weights.safetensors");
    let commands = commands();
    assert!(commands.len() > 12, "README.md has lost its commands: {commands:?}");
    for command in commands {
        let mut line = command
            .replace("cifar10:DIR", "cifar10:cifar")
            .replace("folder:DIR", "folder:photos")
            .replace("text:FILE", "text:text.txt")
            .replace("runs/NAME", &small.display().to_string())
            .replace("resnet50.safetensors", &weights.display().to_string())
            .replace("photo.jpg", "photos/val/dark/0.png")
            .replace("--batch 32", "--batch 2");
        if line.starts_with("paceline train --model") && !line.contains("--batch") {
            line += " --batch 4";
        }
        if line.starts_with("paceline bench kernels") {
            line += " --seconds 0.001";
        }
        if line.starts_with("paceline bench scaling") {
            line += " --steps 1 --repeats 1 --batch 4";
        }
        if line.starts_with("paceline choose") {
            line = line.replace("20s", "3s") + " --quiet";
        }
        if line.starts_with("paceline train") {
            line += if line.contains("--resume") { " --max-steps 3 --quiet" } else { " --max-steps 1 --quiet" };
        }
        if line.starts_with("paceline launch --workers") {
            line += " --batch 4 --max-steps 1 --quiet";
        }
        let on_gpu = line.contains("--device cuda") || line.contains("-gpu.toml");
        if on_gpu && !cuda::count().is_ok_and(|count| count > 0) {
            let _ = writeln!(std::io::stderr(), "skipped: `{command}` of README.md: no GPU");
            continue;
        }
        paceline(folder, &line);
    }
}

#[test]
fn every_recipe_is_a_configuration() {
    let recipes = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes")).unwrap();
    let mut count = 0;
    for recipe in recipes {
        let path = recipe.unwrap().path();
        let config = paceline::train::Config::from_toml(&fs::read_to_string(&path).unwrap()).and_then(|c| c.check());
        config.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        count += 1;
    }
    assert!(count > 2);
}
