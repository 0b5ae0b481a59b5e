//! The parts of a model whose layers are computed by several ranks together: what each has, and what it exchanges in a step.

use std::fmt::Write;

use paceline_system::event::{Event, PartUse};

use super::markup::{escape, section};
use crate::history::History;
use crate::quantity::{bytes, count};

/// The section; nothing where layers are whole.
pub(crate) fn parts(history: &History) -> String {
    let Some(Event::Parts { split, parts }) = &history.split else { return String::new() };
    let mut out = format!(
        "<p>Layers are computed by {} ranks together, as <code>{}</code> asks for; every exchange is waited for.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Part</th><th class=\"n\">Parameters</th>\
         <th class=\"n\">Exchanges per step</th><th class=\"n\">Sent per step</th></tr></thead>\n<tbody>\n",
        parts.len(),
        escape(split)
    );
    for (number, PartUse { parameters, exchanges, sent_bytes }) in parts.iter().enumerate() {
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{number}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            count(*parameters),
            count(*exchanges),
            bytes(*sent_bytes)
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("parts", "Parts", &out)
}
