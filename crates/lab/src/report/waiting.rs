//! The report's tables of who waited for whom: ranks that were late, and servers.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::markup::{escape, section};
use crate::history::History;
use crate::quantity::{count, percent_short, seconds};
use crate::summary::Summary;

/// Ranks that others waited for, as rank 0 named them.
pub(crate) fn late(histories: &[History]) -> String {
    let all: Vec<_> = histories.iter().flat_map(|history| &history.late).collect();
    if all.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Rank</th><th>Machine</th><th class=\"n\">At</th>\
         <th class=\"n\">After step</th><th>It was in</th><th>Others waited for</th><th class=\"n\">They waited</th>\
         <th class=\"n\">Caught up</th></tr></thead>\n<tbody>\n",
    );
    for late in all {
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td>{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            late.rank,
            escape(&late.host),
            seconds(late.time_s),
            count(late.step),
            late.phase,
            escape(late.message.as_deref().unwrap_or("–")),
            seconds(late.waited_s),
            late.until_s.map_or_else(|| "–".to_owned(), seconds)
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("late", "Late ranks", &out)
}

/// What servers did, and what steps had missed.
pub(crate) fn servers(histories: &[History]) -> String {
    let servers = || histories.iter().filter(|history| history.is_server());
    if servers().next().is_none() {
        return staleness(histories);
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Rank</th><th>Machine</th><th class=\"n\">Steps</th>\
         <th class=\"n\">Time</th><th class=\"n\">Exchange</th><th class=\"n\">Update</th><th>Waited longest for</th>\
         <th>Outcome</th></tr></thead>\n<tbody>\n",
    );
    for (history, served) in servers().filter_map(|history| Some((history, history.served.as_ref()?))) {
        let share = |part_s: f64| percent_short(part_s / served.seconds.max(f64::MIN_POSITIVE));
        let longest = served.longest().map(|(rank, waited_s)| format!("rank {rank}, {}", seconds(waited_s)));
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td>{}</td><td>{}</td></tr>",
            history.rank,
            escape(history.start().map_or("", |start| &start.host.name)),
            count(served.step),
            seconds(served.seconds),
            share(served.exchange_s),
            share(served.update_s),
            longest.unwrap_or_else(|| "–".to_owned()),
            escape(&Summary::of_history(history).outcome.to_string())
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("servers", "Servers", &out) + &staleness(histories)
}

/// Servers do not tell apart what has missed more.
const MISSED_MAX: usize = 64;

/// The shares of a histogram that are shown.
const SHARES_MAX: usize = 8;

/// How many updates steps had missed, where every worker's step is one of its own. All servers hear the same pushes, and workers that
/// share memory tell each of itself: of a worker, the first who knows tells.
fn staleness(histories: &[History]) -> String {
    let mut known = BTreeMap::new();
    for (worker, staleness) in
        histories.iter().filter_map(|history| history.served.as_ref()).flat_map(|served| &served.staleness)
    {
        known.entry(worker).or_insert(staleness);
    }
    if known.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<p>Updates that were applied between the reading of the weights that a step was computed from and the step itself.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Worker</th><th class=\"n\">Steps</th>\
         <th class=\"n\">Missed on average</th><th class=\"n\">At most</th><th>Missed: share of steps</th></tr></thead>\n<tbody>\n",
    );
    for (worker, staleness) in known {
        let share = |(missed, share): (usize, f64)| format!("{missed}: {}", percent_short(share));
        let mut shares: Vec<String> = staleness.shares().take(SHARES_MAX).map(share).collect();
        if staleness.shares().count() > SHARES_MAX {
            shares.push("…".into());
        }
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{worker}</td><td class=\"n\">{}</td><td class=\"n\">{:.2}</td><td class=\"n\">{}</td><td>{}</td></tr>",
            count(staleness.steps()),
            staleness.mean(),
            if staleness.most() < MISSED_MAX { staleness.most().to_string() } else { format!("{MISSED_MAX} or more") },
            shares.join(", ")
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("staleness", "Staleness", &out)
}
