//! The binary `paceline`: [`paceline::cli`] with the models and data of the library.

mod allocator;

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

fn main() -> ExitCode {
    paceline::cli::run()
}
