//! Bytes from anywhere, for every decoder of what peers, files and users send: each body takes any bytes and must return.
//!
//! A body is a plain function, called by two drivers: a program of libFuzzer (`fuzz_targets/`, for `cargo fuzz` on nightly) and the
//! test `tests/stable.rs`, which mutates the corpus for a moment on every `cargo test`. What a body asserts besides is what its
//! decoder promises: bounds, and that what it has taken it would take again.

mod files;
mod lent;
mod peers;
mod words;

/// A decoder and its name, which is that of its folder in `corpus/`.
pub type Target = (&'static str, fn(&[u8]));

/// Every decoder.
pub const TARGETS: &[Target] = &[
    ("frame", peers::frame),
    ("greeting", peers::greeting),
    ("message", peers::message),
    ("parameter_server", peers::parameter_server),
    ("center", peers::center),
    ("sandblaster", peers::sandblaster),
    ("global", peers::global),
    ("samples", peers::samples),
    ("listing", peers::listing),
    ("memory_box", lent::memory_box),
    ("cluster_file", words::cluster_file),
    ("hosts", words::hosts),
    ("nodelist", words::nodelist),
    ("environment", words::environment),
    ("token", words::token),
    ("config", words::config),
    ("certificates", files::certificates),
    ("choices", files::choices),
    ("engines", files::engines),
    ("weights", files::weights),
    ("manifest", files::manifest),
    ("event_log", files::event_log),
    ("cifar10", files::cifar10),
    ("idx", files::idx),
    ("image", files::image),
];

/// Runs the target of this name.
///
/// # Panics
/// When there is none, and when the decoder breaks a promise.
pub fn run(name: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|target| target.0 == name);
    (found.unwrap_or_else(|| panic!("there is no target {name}")).1)(bytes);
}
