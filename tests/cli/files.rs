//! Files that are not what they seem: links to nothing, FIFOs, devices, headers that promise too much; and files that are
//! in the way.

use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::place::{Place, QUICK, has, skip, text};

/// Two classes of a few small images.
fn photographs() -> Place {
    let place = Place::new();
    for (class, name) in ["left", "right"].iter().enumerate() {
        for number in 0..3 {
            place.write_png(&format!("photos/train/{name}/{number}.png"), 16, class as u32, number);
            place.write_png(&format!("photos/val/{name}/{number}.png"), 16, class as u32, number);
        }
    }
    place
}

const TRAIN: &str = "train --model mlp --data folder:photos --size 16 --batch 2 --epochs 1 --quiet --run";

/// Runs a command that must end by itself; one that waits for a FIFO's writer would not.
fn ends(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("it does not end: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Runs the binary, which must refuse with all of `words`. (`Place::refuses` reads every file, and would wait for FIFOs.)
fn refuses(place: &Place, arguments: &str, words: &[&str]) {
    let output = ends(place.command(arguments));
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "paceline {arguments}: {wrong}");
    assert!(words.iter().all(|word| wrong.contains(word)), "paceline {arguments}: {words:?} in {wrong}");
}

#[test]
fn data_inspect_never_replaces_a_file_unasked() {
    let place = Place::new();
    for (arguments, sheet) in [
        ("data inspect synthetic:8x8x3/4/64", "synthetic-8x8x3-4-64-contact-sheet.png"),
        ("data inspect synthetic:8x8x3/4/64 --sheet mine.png", "mine.png"),
    ] {
        place.write(sheet, "not to be lost");
        place.refuses(arguments, &[sheet, "is there already", "another name", "--force"]);
        place.run(&format!("{arguments} --force"));
        assert!(place.read(sheet).starts_with(b"\x89PNG"));
    }
    symlink("nowhere", place.path("link.png")).unwrap();
    let output = place.output("data inspect synthetic:8x8x3/4/64 --sheet link.png");
    assert_eq!(output.status.code(), Some(2), "a link is not replaced either: {}", text(&output.stderr));
    assert!(place.path("link.png").is_symlink());
    place.write("text.txt", "the quick brown fox jumps over the lazy dog. ".repeat(60));
    place.run("data inspect text:text.txt --sheet mine.png");
}

#[test]
fn a_link_to_nothing_counts_as_damaged() {
    let place = photographs();
    std::fs::remove_file(place.path("photos/train/left/1.png")).unwrap();
    symlink("nothing.png", place.path("photos/train/left/1.png")).unwrap();
    place.fails(&format!("{TRAIN} run"), 1, &["left/1.png is damaged (it is a link to nothing)", "--damaged-max 1"]);
    place.run(&format!("{TRAIN} other --damaged-max 1"));
    let seen = place.run("data inspect folder:photos");
    assert!(seen.contains("damaged: photos/train/left/1.png (it is a link to nothing)"), "{seen}");
}

#[test]
fn an_image_that_may_not_be_read_counts_as_damaged() {
    use std::os::unix::fs::PermissionsExt;
    let place = photographs();
    let image = place.path("photos/train/left/1.png");
    std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o000)).unwrap();
    // Nothing is closed to root, unless it gives that up.
    let mut closed: Vec<&str> = Vec::new();
    if std::fs::read(&image).is_ok() {
        if !has("setpriv", "an_image_that_may_not_be_read_counts_as_damaged") {
            return;
        }
        closed = vec!["setpriv", "--bounding-set", "-dac_override,-dac_read_search"];
    }
    let output = |arguments: &str| {
        let plain = place.command(arguments);
        let Some((program, words)) = closed.split_first() else { return ends(plain) };
        let mut command = Command::new(program);
        command.args(words).arg(plain.get_program()).args(plain.get_args()).current_dir(place.path(""));
        ends(command)
    };
    let refused = output(&format!("{TRAIN} run"));
    let wrong = text(&refused.stderr);
    if wrong.contains("setpriv: ") {
        return skip("an_image_that_may_not_be_read_counts_as_damaged", "needs the right to give rights up");
    }
    assert_eq!(refused.status.code(), Some(1), "{wrong}");
    assert!(wrong.contains("left/1.png is damaged (Permission denied") && wrong.contains("--damaged-max 1"), "{wrong}");
    let allowed = output(&format!("{TRAIN} other --damaged-max 1"));
    assert!(allowed.status.success(), "{}", text(&allowed.stderr));
}

#[test]
fn what_is_no_file_is_refused_without_being_opened() {
    let place = Place::with_run();
    if !has("mkfifo", "what_is_no_file_is_refused_without_being_opened") {
        return;
    }
    let fifo = |name: &str| assert!(Command::new("mkfifo").arg(place.path(name)).status().unwrap().success());
    fifo("pipe.png");
    place.write("token", "");
    let pipe = ["pipe.png", "named pipe"];
    for (arguments, words) in [
        ("predict run pipe.png", pipe),
        ("predict run /dev/zero", ["/dev/zero", "device"]),
        ("predict pipe.png pipe.png", pipe),
        ("evaluate /dev/zero", ["/dev/zero", "no config.toml"]),
        ("export pipe.png --onnx out.onnx", pipe),
        ("train pipe.png", pipe),
        ("train /dev/zero", ["/dev/zero", "device"]),
        ("train --cluster pipe.png --job worker --task 0", pipe),
        ("train --workers 2 --tls=pipe.png,pipe.png,pipe.png", pipe),
        ("train --data text:pipe.png --model lstm", pipe),
        ("data inspect text:/dev/zero", ["/dev/zero", "device"]),
    ] {
        refuses(&place, arguments, &words);
    }
    let weights = format!("train {QUICK} --weights pipe.png --run new");
    refuses(&place, &weights, &pipe);
    std::fs::remove_file(place.path("run/config.toml")).unwrap();
    fifo("run/config.toml");
    refuses(&place, "train --resume run", &["run/config.toml", "named pipe"]);
    std::fs::remove_file(place.path("run/events/rank-0.jsonl")).unwrap();
    fifo("run/events/rank-0.jsonl");
    refuses(&place, "report run", &["rank-0.jsonl", "named pipe"]);
}

#[test]
fn a_folder_of_images_holds_files_only() {
    let place = photographs();
    let odd = place.path("photos/val/right/x.png");
    let folder = || std::fs::create_dir(&odd).unwrap();
    let device = || symlink("/dev/zero", &odd).unwrap();
    let pipe = || assert!(Command::new("mkfifo").arg(&odd).status().unwrap().success());
    for (kind, make) in [("a folder", &folder as &dyn Fn()), ("a device", &device), ("a named pipe", &pipe)] {
        if kind == "a named pipe" && !has("mkfifo", "a_folder_of_images_holds_files_only") {
            return;
        }
        make();
        let words = ["photos/val/right/x.png is", kind, "remove it"];
        refuses(&place, &format!("{TRAIN} run --damaged-max 9"), &words);
        refuses(&place, "data inspect folder:photos", &words);
        if kind == "a folder" { std::fs::remove_dir(&odd).unwrap() } else { std::fs::remove_file(&odd).unwrap() }
    }
}

/// A PNG or JPEG of 40 × 40 pixels whose header says 13,000 × 13,000.
fn boastful(format: image::ImageFormat) -> Vec<u8> {
    let pixel = |x: u32, y: u32| image::Rgb([(x * 6) as u8, (y * 6) as u8, (x * y) as u8]);
    let mut bytes = std::io::Cursor::new(Vec::new());
    image::RgbImage::from_fn(40, 40, pixel).write_to(&mut bytes, format).unwrap();
    let mut bytes = bytes.into_inner();
    let side = 13_000u16.to_be_bytes();
    if format == image::ImageFormat::Png {
        bytes[16..24].copy_from_slice(&[[0, 0], side, [0, 0], side].concat());
        let bit = |sum: u32| (sum >> 1) ^ if sum & 1 == 1 { 0xEDB8_8320 } else { 0 };
        let sum = !bytes[12..29].iter().fold(!0u32, |sum, &byte| (0..8).fold(sum ^ u32::from(byte), |sum, _| bit(sum)));
        bytes[29..33].copy_from_slice(&sum.to_be_bytes());
    } else {
        let frame = bytes.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
        bytes[frame + 5..frame + 9].copy_from_slice(&[side, side].concat());
    }
    bytes
}

#[test]
fn a_header_of_many_pixels_over_few_bytes_takes_no_memory() {
    let place = photographs();
    place.write("photos/train/left/boast.png", boastful(image::ImageFormat::Png));
    place.write("photos/train/left/boast.jpg", boastful(image::ImageFormat::Jpeg));
    // All there is to the program and a small set is below 200 MB; each of the pictures would take 507 MB.
    let command = place.command("data inspect folder:photos");
    let mut bounded = Command::new("sh");
    bounded.args(["-c", "ulimit -v 400000 && exec \"$@\"", "sh"]).arg(command.get_program()).args(command.get_args());
    let output = ends({
        bounded.current_dir(place.path(""));
        bounded
    });
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    for name in ["boast.png", "boast.jpg"] {
        let line = said.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {said}"));
        assert!(line.contains("damaged") && line.contains("13000×13000 pixels"), "{line}");
    }
    place.fails(&format!("{TRAIN} run"), 1, &["boast.", "13000×13000", "--damaged-max 1"]);
    place.run(&format!("{TRAIN} other --damaged-max 2"));
    place.refuses("predict other photos/train/left/boast.png", &["boast.png", "13000×13000"]);
}

#[test]
fn a_weights_file_with_millions_of_class_names_is_refused() {
    let place = Place::with_run();
    place.write_png("picture.png", 8, 0, 0);
    let whole = place.weights("run", 8);
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let card = header["__metadata__"]["paceline.model"].as_str().unwrap().to_owned();
    let mut card: serde_json::Value = serde_json::from_str(&card).unwrap();
    for (name, words) in [("c", "more than 262144 class names"), ("a longer name", "its header has ")] {
        card["class_names"] = vec![name; 3_000_000].into();
        header["__metadata__"]["paceline.model"] = card.to_string().into();
        let mut bytes = header.to_string().into_bytes();
        bytes.resize(bytes.len().next_multiple_of(8), b' ');
        place.write(
            "many.safetensors",
            [&(bytes.len() as u64).to_le_bytes()[..], &bytes, &whole[8 + length..]].concat(),
        );
        for arguments in ["predict many.safetensors picture.png", "export many.safetensors --onnx out.onnx"] {
            place.refuses(arguments, &["many.safetensors", words]);
        }
    }
}
