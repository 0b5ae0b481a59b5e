//! The command line, for the binary `paceline` and for programs that bring models and data of their own.
//!
//! Exit codes: 0 done, 1 failed, 2 refused (bad input; nothing was started or overwritten), 130, 143 or 129 ended by SIGINT, SIGTERM or SIGHUP
//! and saved.

use std::process::ExitCode;

use clap::Parser;

use crate::arguments::{Cli, Command};
use crate::command;
use crate::failure::{self, Failure};
use crate::system::memory;
use crate::tensor::device::cpu::isa::Isa;
use crate::train::Registry;

/// Reads what the user typed, calls the library, and says what happened.
pub fn run() -> ExitCode {
    run_with(&Registry::new())
}

/// As [`run`], for a program that brings models and data of its own: every command knows them by name.
///
/// ```no_run
/// use paceline::prelude::*;
///
/// fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
///     let x = net.flatten(x)?;
///     net.linear("fc", x, classes)
/// }
///
/// fn main() -> std::process::ExitCode {
///     paceline::cli::run_with(&Registry::new().model("mine", model))
/// }
/// ```
pub fn run_with(registry: &Registry) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::report_usage(error),
    };
    if let Err(error) = Isa::preferred() {
        return Failure::refused(error).report();
    }
    if let Err(error) = registry.check() {
        return Failure::from(error).report();
    }
    memory::unwind_silently();
    let outcome =
        memory::caught(|| dispatch(cli.command, registry)).unwrap_or_else(|refused| Err(Failure::failed(refused)));
    match outcome {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

fn dispatch(command: Command, registry: &Registry) -> command::Outcome {
    match command {
        Command::Train(arguments) => command::train::run(*arguments, registry),
        Command::Choose(arguments) => command::choose::run(&arguments, registry),
        Command::Launch(arguments) => command::launch::run(&arguments),
        Command::Evaluate(arguments) => command::evaluate::run(&arguments, registry),
        Command::Predict(arguments) => command::predict::run(&arguments, registry),
        Command::Export(arguments) => command::export::run(&arguments, registry),
        Command::Plan(arguments) => command::plan::run(&arguments, registry),
        Command::Models(arguments) => command::models::run(&arguments, registry),
        Command::Data(arguments) => command::data::run(&arguments, registry),
        Command::Serve(arguments) => command::serve::run(&arguments),
        Command::Bench(arguments) => command::bench::run(&arguments, registry),
        Command::Doctor(arguments) => command::doctor::run(&arguments),
        Command::Report(arguments) => command::report::run(&arguments),
    }
}
