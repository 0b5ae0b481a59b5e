//! Programs in C, compiled with the system's compiler against the header and the library and run with boxes of this process.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::memory_box::{BoxServer, Limits, ServerOptions};
use paceline_comm::wire::Tls;
use paceline_comm::{Stop, Token, Wait};
use paceline_system::{clock, secret};

// So that cargo links the library for this test.
extern crate paceline_c as _;

const MB: u64 = 1 << 20;

/// With warnings as errors; and with whatever the compiler finds when programs run.
const PLAIN: &[&str] = &["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=c11", "-O1"];
const WATCHED: &[&str] =
    &["-Wall", "-Wextra", "-Werror", "-std=c11", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// As long as a program may take on a machine that has much else to do.
const PROGRAM_MAX: Duration = Duration::from_secs(240);

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn compiler() -> Command {
    Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()))
}

/// Says that a test is skipped, straight to the terminal: the harness keeps what a passing test prints.
fn skip(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

/// Whether the compiler makes programs that run, with these flags.
fn compiles(flags: &[&str]) -> bool {
    let place = tempfile::tempdir().unwrap();
    let (source, program) = (place.path().join("nothing.c"), place.path().join("nothing"));
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let output = compiler().args(flags).arg(&source).arg("-o").arg(&program).output();
    output.is_ok_and(|output| output.status.success())
        && Command::new(&program).output().is_ok_and(|output| output.status.success())
}

/// The library, beside this test: the newest one, if there are some of other features.
fn library() -> PathBuf {
    let beside = std::env::current_exe().unwrap();
    let entries = std::fs::read_dir(beside.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libpaceline_c") && name.ends_with(".a")
    };
    let newest = entries.filter(is_ours).max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.expect("cargo makes the library with the test")
}

fn compile(source: &Path, program: &Path, flags: &[&str]) {
    let mut compiler = compiler();
    compiler.args(flags).arg(source).arg("-I").arg(folder().join("include")).arg(library());
    let output = compiler.args(["-lpthread", "-ldl", "-lm", "-o"]).arg(program).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A box on a thread, which ends with the value.
struct Running {
    address: String,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(token: &Token, is_secret: bool) -> Self {
        let limits = Limits { bytes_max: 256 * MB, client_bytes_max: 128 * MB, regions_max: 100 };
        let tls = is_secret.then(|| Tls::from_token(token));
        let options = ServerOptions { token: token.clone(), tls, pool_bytes: MB, limits };
        let server = BoxServer::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let (address, stop) = (server.address().unwrap().to_string(), server.stop());
        let body = move || server.serve(&mut || false, &mut |_| {});
        Self { address, stop, thread: Some(std::thread::spawn(body)) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.set("the test is over");
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A compiled program, and what it is told.
struct Program {
    place: tempfile::TempDir,
    token: Token,
}

impl Program {
    fn new(flags: &[&str]) -> Self {
        let program = Self { place: tempfile::tempdir().unwrap(), token: Token::random() };
        compile(&folder().join("tests/box.c"), &program.path("box"), flags);
        secret::create(&program.path("token"), &program.token.to_hex()).unwrap();
        program
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn start(&self, way: &str, addresses: &str) -> Child {
        let mut command = Command::new(self.path("box"));
        command.args([way, addresses, &self.token.to_hex()]).arg(self.path("token")).arg("a program in C");
        command.env("ASAN_OPTIONS", "detect_leaks=1:abort_on_error=0").env("UBSAN_OPTIONS", "print_stacktrace=1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(File::create(self.path(&format!("{way}.said"))).unwrap()).spawn().unwrap()
    }

    /// Waits for its end, which is a good one.
    fn end(&self, way: &str, mut child: Child) {
        let status = wait(&mut child);
        let said = std::fs::read_to_string(self.path(&format!("{way}.said"))).unwrap();
        assert!(status.is_some_and(|status| status.success()) && said.is_empty(), "{way}: {status:?}\n{said}");
    }

    fn run(&self, way: &str, boxes: &[Running]) {
        let addresses: Vec<&str> = boxes.iter().map(|running| &*running.address).collect();
        self.end(way, self.start(way, &addresses.join(", ")));
    }

    /// All that it does, with boxes that begin empty.
    fn run_all(&self) {
        let boxes =
            |count, is_secret| -> Vec<Running> { (0..count).map(|_| Running::start(&self.token, is_secret)).collect() };
        for way in ["mapped", "tcp", "sockets", "file"] {
            self.run(way, &boxes(1, false));
        }
        self.run("tls", &boxes(1, true));
        self.run("several", &boxes(3, false));
        self.meet(&boxes(1, false)[0]);
        for way in ["gone-mapped", "gone-tcp", "gone-tls"] {
            self.outlive(way, Running::start(&self.token, way == "gone-tls"));
        }
    }

    /// Two processes.
    fn meet(&self, running: &Running) {
        let mut first = self.start("first", &running.address);
        let made = hear(&mut first);
        if made == "made\n" {
            self.end("second", self.start("second", &running.address));
        }
        self.end("first", first);
        assert_eq!(made, "made\n");
    }

    /// A box that ends before the program does.
    fn outlive(&self, way: &str, running: Running) {
        let mut child = self.start(way, &running.address);
        let made = hear(&mut child);
        drop(running);
        let _ = child.stdin.take().unwrap().write_all(b"g");
        self.end(way, child);
        assert_eq!(made, "made\n");
    }
}

/// The first line of what a program says; the rest is short, and may stay in the pipe.
fn hear(child: &mut Child) -> String {
    let mut line = String::new();
    let stdout = child.stdout.take().unwrap();
    let mut reader = BufReader::new(stdout);
    reader.read_line(&mut line).unwrap();
    child.stdout = Some(reader.into_inner());
    line
}

fn wait(child: &mut Child) -> Option<ExitStatus> {
    let limit = Wait::new(PROGRAM_MAX, &Stop::new());
    while !limit.left().is_zero() {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        clock::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    let _ = child.wait();
    None
}

#[test]
fn a_program_in_c_does_what_the_header_says() {
    if !compiles(PLAIN) {
        return skip("a_program_in_c_does_what_the_header_says", "no C compiler (set CC)");
    }
    Program::new(PLAIN).run_all();
}

#[test]
fn a_program_in_c_uses_memory_as_it_may() {
    if !compiles(WATCHED) {
        return skip(
            "a_program_in_c_uses_memory_as_it_may",
            "no C compiler with address and undefined sanitizers (set CC)",
        );
    }
    Program::new(WATCHED).run_all();
}

#[test]
fn the_program_of_the_documentation_adds_up() {
    let source = folder().join("tests/hello.c");
    let page = std::fs::read_to_string(folder().join("../../docs/memory_box.md")).unwrap();
    let shown = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a program in C");
    assert_eq!(shown, std::fs::read_to_string(&source).unwrap(), "docs/memory_box.md shows tests/hello.c");
    if !compiles(PLAIN) {
        return skip("the_program_of_the_documentation_adds_up", "no C compiler (set CC)");
    }
    let (place, token) = (tempfile::tempdir().unwrap(), Token::random());
    let (program, file) = (place.path().join("hello"), place.path().join("token"));
    compile(&source, &program, PLAIN);
    secret::create(&file, &token.to_hex()).unwrap();
    let running = Running::start(&token, false);
    let output = Command::new(&program).arg(&running.address).arg(&file).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0.5 1 1.5, version 1\n", "{output:?}");
    let failed = Command::new(&program).arg("nowhere").arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status.code() == Some(1) && said.contains("HOST:PORT"), "{said}");
}

#[test]
fn the_header_is_one_for_c_plus_plus() {
    let place = tempfile::tempdir().unwrap();
    let (source, object) = (place.path().join("a.cpp"), place.path().join("a.o"));
    std::fs::write(&source, "#include <paceline.h>\nint main() { return paceline_close(nullptr); }\n").unwrap();
    let mut compiler = Command::new("c++");
    let compiler = compiler.args(["-Wall", "-Wextra", "-Werror", "-c"]).arg(&source).arg("-o").arg(&object);
    match compiler.arg("-I").arg(folder().join("include")).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(_) => skip("the_header_is_one_for_c_plus_plus", "no C++ compiler"),
    }
}
