//! `paceline choose`: every way to use this node for a training, measured; and what `paceline train --split auto` does with it.

mod between;

use std::process::ExitCode;

use serde_json::json;

use super::train::resolve;
use between::{Compared, Decided, Nodes};

use super::{Outcome, note, print, print_json, team};
use crate::arguments::{Choose, Schedules, Train, chosen_instead, without};
use crate::choose::apply::Said;
use crate::choose::table::{self, Row};
use crate::choose::{Answer, Found, Request, choose};
use crate::cluster::spec::from_environment;
use crate::failure::Failure;
use crate::nn::Input;
use crate::run::split::outline;
use crate::system::clock::format_utc;
use crate::system::shell::quote;
use crate::system::signal::Stop;
use crate::terminal::Style;
use crate::train::together::{Carry, Sharding, Split};
use crate::train::{Config, Registry};

/// Seconds that a choice may take, if nobody says otherwise.
const BUDGET_S: f64 = 60.0;

/// Runs the command.
pub fn run(arguments: &Choose, registry: &Registry) -> Outcome {
    let train = &arguments.train;
    refuse_what_is_not_for_one_node(train)?;
    let config = resolve(train)?;
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    let style = Style::choose(train.quiet, train.json);
    let nodes = match (&train.hosts, arguments.nodes) {
        (Some(hosts), _) => Nodes::measured(hosts, train.port)?,
        (None, Some(count)) if count > 1 => {
            Some(Nodes::stated(count, arguments.link_latency, arguments.link_bandwidth))
        }
        (None, _) => None,
    };
    let budget_s = train.choose_budget.unwrap_or(BUDGET_S) / if nodes.is_some() { 2.0 } else { 1.0 };
    let request = Request { again: arguments.again, budget_s, ..request((train, &config), registry, &stop, style) };
    match choose(&request)? {
        Answer::Interrupted => Ok(stop.signal().exit_code().into()),
        Answer::NothingApplies(rows) => Err(nothing_applies(&rows)),
        Answer::Found(found) => {
            let decided = match nodes.map(|nodes| between::decide(&request, &found, nodes)).transpose()? {
                Some(Compared::Decided(decided)) => Some(decided),
                Some(Compared::Unknown) | None => None,
                Some(Compared::Interrupted) => return Ok(stop.signal().exit_code().into()),
            };
            show(train, (&config, registry), &found, decided.as_ref());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn request<'a>(
    (train, config): (&'a Train, &'a Config),
    registry: &'a Registry,
    stop: &'a Stop,
    style: Style,
) -> Request<'a> {
    let (calibrate, budget_s) = (train.calibrate, train.choose_budget.unwrap_or(BUDGET_S));
    Request {
        config,
        said: said(train, config),
        registry,
        calibrate,
        tls: train.tls.as_deref(),
        budget_s,
        again: false,
        stop,
        style,
    }
}

fn refuse_what_is_not_for_one_node(train: &Train) -> Result<(), Failure> {
    let sentence = match train {
        Train { resume: Some(_), .. } => {
            "a run that goes on is measured as a new one: type paceline choose with its config.toml in place of --resume"
        }
        Train { cluster: Some(_), .. } => {
            "choose measures the node that it runs on; leave --cluster out, and type --nodes N for several like it"
        }
        Train { run: Some(_), .. } => "choose leaves no run behind; leave --run out",
        Train { split: Some(split), .. } if *split != Split::Auto => "choose finds out how to split; leave --split out",
        Train { cuts, .. } if !cuts.is_empty() => "choose finds out where to cut; leave --cuts out",
        _ => return Ok(()),
    };
    Err(Failure::refused(sentence))
}

/// What was said of the answer already: whatever is not as usual.
fn said(train: &Train, config: &Config) -> Said {
    let usual = Config::default();
    let schedule = train.schedule.iter().rev().find_map(|schedule| match schedule {
        Schedules::Pipeline(kind) => Some(*kind),
        Schedules::LearningRate(_) => None,
    });
    let typed = |value: bool, told: Option<usize>, found: usize| told.or(value.then_some(found));
    Said {
        workers: typed(config.workers != usual.workers, train.workers.or(train.replicas), config.workers),
        threads: config.threads,
        carry: (config.carry != Carry::AUTO).then_some(config.carry),
        parts: typed(config.accumulate != 1, train.accumulate.or(train.micro_batches), config.accumulate),
        schedule: schedule.or((config.schedule != usual.schedule).then_some(config.schedule)),
        shard: (config.shard != Sharding::None).then_some(config.shard),
    }
}

fn nothing_applies(rows: &[Row]) -> Failure {
    let is_new = |(index, row): &(usize, &Row)| rows[..*index].iter().all(|before| before.why_not != row.why_not);
    let reason = |(_, row): (usize, &Row)| Some(format!("{}: {}", row.setup, row.why_not.as_ref()?));
    let reasons: Vec<String> = rows.iter().enumerate().filter(is_new).filter_map(reason).take(3).collect();
    Failure::refused(format!("no set-up could be measured: {}", reasons.join("; ")))
}

/// The table, the choice, why, and what to type.
fn show(train: &Train, (config, registry): (&Config, &Registry), found: &Found, decided: Option<&Decided>) {
    let line = command_line(found.choice());
    if train.json {
        let rows: Vec<_> = found.rows.iter().map(table::to_json).collect();
        print_json(&json!({
            "model": config.model,
            "data": config.data,
            "batch": config.batch,
            "setups": rows,
            "chosen": found.choice().setup,
            "speedup": found.choice().speedup,
            "reason": found.reason(),
            "command": line,
            "seconds": found.seconds,
            "kept_unix_s": found.kept_unix_s,
            "between": decided.map(Decided::to_json),
        }));
        return;
    }
    let unit = match outline(config, registry) {
        Some((Input::Tokens { .. }, ..)) => "sequences/s",
        _ => "images/s",
    };
    let choice = &found.choice().setup;
    let head = format!("{} on {}, batch {}, {}\n\n", config.model, config.data, config.batch, config.optimizer);
    let took = match found.kept_unix_s {
        Some(unix_s) => format!("measured {} UTC; --again measures anew", format_utc(unix_s)),
        None => format!("measured in {:.0} s, and kept", found.seconds),
    };
    let table = table::text(&found.rows, choice, unit);
    let between = decided.map_or(String::new(), |decided| format!("{}\n", decided.text()));
    print(&format!("{head}{table}\n{}\n{between}{took}\n\n{line}\n", found.reason()));
}

/// What is typed for a choice, and not for the training on one node that follows from it.
const LEFT_OUT: [&str; 6] = ["--choose-budget", "--split", "--nodes", "--link-bandwidth", "--link-latency", "--hosts"];

/// What was typed, as a training, with what was chosen.
fn command_line(choice: &Row) -> String {
    let own = without(std::env::args().skip(2), &LEFT_OUT).into_iter();
    let own = own.filter(|word| !["--again", "--json", "--quiet", "-q"].contains(&word.as_str()));
    let line = ["paceline", "train"].map(str::to_owned).into_iter().chain(own);
    let line: Vec<String> = chosen_instead(line, &choice.flags).iter().map(|word| quote(word)).collect();
    line.join(" ")
}

/// What the other processes of a run are started with, and this one goes on with, if the way to split is to be found out here; none if
/// that is not asked, or cannot be.
pub fn for_training(train: &Train, config: &Config, registry: &Registry) -> Result<Auto, Failure> {
    let is_member = !matches!(from_environment(&team::variables()), Ok(None));
    let elsewhere = train.cluster.is_some() || train.resume.is_some() || train.hosts.is_some() && train.distribute;
    if config.split != Split::Auto || is_member || elsewhere {
        return Ok(Auto::NotAsked);
    }
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    let style = Style::choose(train.quiet, train.json);
    let nodes = train.hosts.as_deref().map(|hosts| Nodes::measured(hosts, train.port)).transpose()?.flatten();
    if train.hosts.is_some() && nodes.is_none() {
        return Ok(Auto::NotAsked);
    }
    let request = request((train, config), registry, &stop, style);
    let request = Request { budget_s: request.budget_s / if nodes.is_some() { 2.0 } else { 1.0 }, ..request };
    match choose(&request)? {
        Answer::Interrupted => Ok(Auto::Interrupted(stop.signal().exit_code().into())),
        // Whatever is wrong is found again, and said, by whoever tries to train it; a model that does not fit whole is cut.
        Answer::NothingApplies(_) => Ok(Auto::NotAsked),
        Answer::Found(found) => {
            if let Some(nodes) = nodes {
                let decided = match between::decide(&request, &found, nodes)? {
                    Compared::Decided(decided) => decided,
                    Compared::Unknown => return Ok(Auto::NotAsked),
                    Compared::Interrupted => return Ok(Auto::Interrupted(stop.signal().exit_code().into())),
                };
                let told =
                    if decided.distributes() { "" } else { "; so this host trains alone (--distribute for all)" };
                note(&format!("{}{told}", decided.text()));
                if decided.distributes() {
                    return Ok(Auto::NotAsked);
                }
            }
            if !train.quiet && !train.json {
                let took = match found.kept_unix_s {
                    Some(unix_s) => format!("measured {} UTC", format_utc(unix_s)),
                    None => format!("measured in {:.0} s", found.seconds),
                };
                note(&format!("{} ({took}; paceline choose shows the table)", found.reason()));
            }
            Ok(Auto::Words(found.choice().flags.clone()))
        }
    }
}

/// What `--split auto` comes to.
pub enum Auto {
    /// Nothing is to be found out here.
    NotAsked,
    /// The run is started with these words too.
    Words(Vec<String>),
    /// The user has asked for the end.
    Interrupted(ExitCode),
}
