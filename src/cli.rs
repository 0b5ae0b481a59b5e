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

/// Reads what the user typed, calls the library, and says what happened.
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::report_usage(error),
    };
    if let Err(error) = Isa::preferred() {
        return Failure::refused(error).report();
    }
    memory::unwind_silently();
    let outcome = memory::caught(|| dispatch(cli.command)).unwrap_or_else(|refused| Err(Failure::failed(refused)));
    match outcome {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

fn dispatch(command: Command) -> command::Outcome {
    match command {
        Command::Train(arguments) => command::train::run(*arguments),
        Command::Launch(arguments) => command::launch::run(&arguments),
        Command::Evaluate(arguments) => command::evaluate::run(&arguments),
        Command::Predict(arguments) => command::predict::run(&arguments),
        Command::Export(arguments) => command::export::run(&arguments),
        Command::Plan(arguments) => command::plan::run(&arguments),
        Command::Models(arguments) => command::models::run(&arguments),
        Command::Data(arguments) => command::data::run(&arguments),
        Command::Bench(arguments) => command::bench::run(&arguments),
        Command::Doctor(arguments) => command::doctor::run(&arguments),
        Command::Report(arguments) => command::report::run(&arguments),
    }
}
