//! `paceline choose`: every way to use this node for a training, measured; and what `paceline train --split auto` does with it.

mod between;

use std::process::ExitCode;

use serde_json::json;

use super::train::{Place, resolve};
use between::Decided;

use super::{Outcome, note, print, print_json, team};
use crate::arguments::{Choose, Schedules, Train, chosen_instead, without};
use crate::choose::apply::Said;
use crate::choose::table::{self, Row};
use crate::choose::{Answer, Found, Request, choose};
use crate::cluster::Member;
use crate::cluster::launch::child;
use crate::cluster::spec::from_environment;
use crate::comm::Token;
use crate::failure::Failure;
use crate::nn::Input;
use crate::run::split::outline;
use crate::run::team::Meeting;
use crate::system::clock::format_utc;
use crate::system::shell::quote;
use crate::system::signal::Stop;
use crate::terminal::Style;
use crate::train::compute::Compute;
use crate::train::together::{Carry, Sharding, Split};
use crate::train::{Config, Registry};

/// Seconds that a choice may take, if nobody says otherwise.
const BUDGET_S: f64 = 60.0;

/// Runs the command: for this node, as the launcher of the same on several, or as one of them.
pub fn run(arguments: &Choose, registry: &Registry) -> Outcome {
    let train = &arguments.train;
    refuse_what_is_not_for_one_node(train)?;
    let config = resolve(train)?;
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    if train.hosts.is_some() {
        let words = without(std::env::args().skip(1), &["--hosts"]);
        return team::launch_until(&team::starts(train, &config, words)?, &stop);
    }
    let style = Style::choose(train.quiet, train.json);
    let variables = team::variables();
    let member = from_environment(&variables)?.filter(|member| member.world > 1);
    let request =
        Request { again: arguments.again, ..request((train, &config), registry, &stop, style, member.as_ref()) };
    if let Some(member) = member {
        refuse_a_share_of_a_node(&member)?;
        let (is_first, world) = (member.rank.index() == 0, member.world);
        let token = child::begin(&variables, &stop)?;
        let Some(own) = between::measure(&request, world)? else { return Ok(stop.signal().exit_code().into()) };
        let decided = between::confer((&request, &own), member, &meeting(train, registry, token))?;
        if is_first {
            let whole = own.whole.map_err(|rows| nothing_applies(&rows))?;
            show(train, (&config, registry), &whole, decided.as_ref());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let Some(count) = arguments.nodes.filter(|count| *count > 1) else {
        return match choose(&request)? {
            Answer::Interrupted => Ok(stop.signal().exit_code().into()),
            Answer::NothingApplies(rows) => Err(nothing_applies(&rows)),
            Answer::Found(found) => {
                show(train, (&config, registry), &found, None);
                Ok(ExitCode::SUCCESS)
            }
        };
    };
    let Some(own) = between::measure(&request, count)? else { return Ok(stop.signal().exit_code().into()) };
    let links = (arguments.link_latency, arguments.link_bandwidth);
    let decided = between::imagine((&request, &own), count, links);
    let whole = own.whole.map_err(|rows| nothing_applies(&rows))?;
    show(train, (&config, registry), &whole, decided.as_ref());
    Ok(ExitCode::SUCCESS)
}

/// How this node meets the others.
fn meeting(train: &Train, registry: &Registry, token: Token) -> Meeting {
    let (quiet, bind, tls, token) = (train.quiet, train.bind, train.tls.clone(), Some(token));
    Meeting { quiet, bind, tls, token, registry: registry.clone(), ..Meeting::default() }
}

fn request<'a>(
    (train, config): (&'a Train, &'a Config),
    registry: &'a Registry,
    stop: &'a Stop,
    style: Style,
    member: Option<&Member>,
) -> Request<'a> {
    let mut said = said(train, config);
    if member.is_some() {
        // How many processes there are in all says nothing about those of one node.
        (said.workers, said.carry) = (None, None);
    }
    let (calibrate, budget_s) = (train.calibrate, train.choose_budget.unwrap_or(BUDGET_S));
    Request { config, said, registry, calibrate, tls: train.tls.as_deref(), budget_s, again: false, stop, style }
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

/// Processes that share a node would be in each other's way.
fn refuse_a_share_of_a_node(member: &Member) -> Result<(), Failure> {
    match member.local {
        Some(local) if local.world > 1 => Err(Failure::refused(format!(
            "choose measures a whole node, and {} processes were started on this one; start one on each",
            local.world
        ))),
        _ => Ok(()),
    }
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
        one_task: false,
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

/// What this process goes on with, if the way to split is to be found out here. Processes that were started on several nodes, one on each,
/// find it out together.
pub(super) fn for_training(
    (train, config): (&Train, &Config),
    registry: &Registry,
    place: &Place,
) -> Result<Auto, Failure> {
    let told = train.cluster.is_some() || train.resume.is_some() || train.hosts.is_some() || train.distribute;
    if config.split != Split::Auto || told {
        return Ok(Auto::NotAsked);
    }
    // Whatever is wrong with the variables is said by whoever takes the place that they tell of.
    let member = from_environment(&place.variables).ok().flatten();
    let style = Style::choose(train.quiet, train.json);
    let request = request((train, config), registry, &place.stop, style, member.as_ref());
    if let Some(member) = member {
        let has_others = config.agree.recipe().has_servers() || config.device != Compute::Cpu;
        return match member.local {
            _ if member.world == 1 || has_others => Ok(Auto::NotAsked),
            Some(local) if local.world > 1 => Ok(Auto::NotAsked),
            _ => among_nodes(train, &request, member, place),
        };
    }
    Ok(match choose(&request)? {
        Answer::Interrupted => Auto::Interrupted(place.stop.signal().exit_code().into()),
        // Whatever is wrong is found again, and said, by whoever tries to train it; a model that does not fit whole is cut.
        Answer::NothingApplies(_) => Auto::NotAsked,
        Answer::Found(found) => {
            tell(train, &found);
            Auto::Words(found.choice().flags.clone())
        }
    })
}

/// Says what was found.
fn tell(train: &Train, found: &Found) {
    if train.quiet || train.json {
        return;
    }
    let took = match found.kept_unix_s {
        Some(unix_s) => format!("measured {} UTC", format_utc(unix_s)),
        None => format!("measured in {:.0} s", found.seconds),
    };
    note(&format!("{} ({took}; paceline choose shows the table)", found.reason()));
}

/// Decides with the other nodes: all of them together, or the best alone.
fn among_nodes(train: &Train, request: &Request<'_>, member: Member, place: &Place) -> Result<Auto, Failure> {
    let (rank, world) = (member.rank.index(), member.world);
    // From here on the launcher's wish for an end is heard. The run is another meeting of the same processes.
    let token = child::begin(&place.variables, &place.stop)?;
    let _ = place.token.set(token.clone());
    let Some(own) = between::measure(request, world)? else {
        return Ok(Auto::Interrupted(request.stop.signal().exit_code().into()));
    };
    let decided = between::confer((request, &own), member, &meeting(train, request.registry, token))?;
    let Some(decided) = decided else { return Ok(Auto::NotAsked) };
    if rank == 0 && !train.quiet && !train.json {
        let alone = format!("; so rank {} trains alone (--distribute for all)", decided.best());
        note(&format!("{}{}", decided.text(), if decided.distributes() { "" } else { &alone }));
    }
    Ok(match own.whole {
        _ if decided.distributes() => Auto::Words(own.share_flags()),
        Ok(whole) if rank == decided.best() => {
            tell(train, &whole);
            Auto::Alone(whole.choice().flags.clone())
        }
        _ => Auto::Elsewhere,
    })
}

/// What `--split auto` comes to.
pub(super) enum Auto {
    /// Nothing is to be found out here.
    NotAsked,
    /// The run is started with these words too.
    Words(Vec<String>),
    /// So is it, by this process alone: the others have ended.
    Alone(Vec<String>),
    /// Another node is faster alone, and trains.
    Elsewhere,
    /// The user has asked for the end.
    Interrupted(ExitCode),
}
