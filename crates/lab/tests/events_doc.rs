//! docs/events.md against the code: it names every event and every field that is written, and its examples are events.

use std::collections::{BTreeMap, BTreeSet};

use paceline_system::event::{Event, GpuUse, Line, PartUse, SCHEMA_VERSION, StageUse};
use paceline_system::host::Host;
use paceline_system::phase::{Phase, PhaseTimes};

const DOC: &str = include_str!("../../../docs/events.md");

/// Every event, with every optional field there.
fn all_events() -> Vec<Event> {
    let events = vec![
        Event::RunStarted {
            schema: SCHEMA_VERSION,
            version: String::new(),
            unix_s: 0,
            model: String::new(),
            data: String::new(),
            parameters: 0,
            resumed_step: 0,
            steps_total: 0,
            host: Host { gpu: Some(String::new()), ..Host::default() },
            config: String::new(),
        },
        Event::Step {
            step: 0,
            epoch: 0,
            loss: 0.0,
            accuracy: 0.0,
            learning_rate: 0.0,
            samples: 0,
            portion: Some(0),
            seconds: 0.0,
            phases: PhaseTimes::default(),
        },
        Event::Epoch {
            epoch: 0,
            step: 0,
            train_loss: 0.0,
            train_accuracy: 0.0,
            val_loss: Some(0.0),
            val_top1: Some(0.0),
            val_top5: Some(0.0),
            seconds: 0.0,
            samples_per_s: 0.0,
            data_wait_s: 0.0,
        },
        Event::Evaluated { epoch: 0, step: 0, val_loss: 0.0, val_top1: 0.0, val_top5: 0.0 },
        Event::Restarted { step: 0, number: 0, most: 0 },
        Event::Pipeline {
            schedule: String::new(),
            micro_batches: 0,
            stages: vec![StageUse::default()],
            forecast_s: 0.0,
            speedup: 0.0,
            bound: 0.0,
            drawing: String::new(),
        },
        Event::Parts { split: String::new(), parts: vec![PartUse::default()] },
        Event::Checkpoint { step: 0, path: String::new(), best: false, seconds: 0.0 },
        Event::Gpu(GpuUse {
            busy: Some(0.0),
            memory_used_bytes: Some(0),
            memory_bytes: Some(0),
            power_w: Some(0.0),
            temperature_c: Some(0.0),
        }),
        Event::Served {
            step: 0,
            seconds: 0.0,
            phases: PhaseTimes::default(),
            waited: BTreeMap::new(),
            missed: BTreeMap::new(),
        },
        Event::Late {
            late_rank: 0,
            host: String::new(),
            phase: Phase::Setup,
            step: 0,
            message: Some(String::new()),
            waited_s: 0.0,
            unheard_s: 0.0,
        },
        Event::CaughtUp { late_rank: 0, host: String::new(), step: 0, waited_s: 0.0 },
        Event::Balanced { step: 0, samples: vec![0], samples_per_s: vec![0.0] },
        Event::Lost {
            lost_rank: 0,
            host: String::new(),
            phase: Phase::Setup,
            step: 0,
            portions: 0,
            why: String::new(),
        },
        Event::Returned { returned_rank: 0, host: String::new(), step: 0 },
        Event::Warning { message: String::new() },
        Event::RunFinished {
            step: 0,
            reason: String::new(),
            error: Some(String::new()),
            seconds: 0.0,
            peak_memory_bytes: 0,
        },
    ];
    // A new event does not compile until it is here, and then needs its place in the list above.
    for event in &events {
        match event {
            Event::RunStarted { .. }
            | Event::Step { .. }
            | Event::Epoch { .. }
            | Event::Evaluated { .. }
            | Event::Restarted { .. }
            | Event::Pipeline { .. }
            | Event::Parts { .. }
            | Event::Checkpoint { .. }
            | Event::Gpu(_)
            | Event::Served { .. }
            | Event::Late { .. }
            | Event::CaughtUp { .. }
            | Event::Balanced { .. }
            | Event::Lost { .. }
            | Event::Returned { .. }
            | Event::Warning { .. }
            | Event::RunFinished { .. } => {}
        }
    }
    events
}

fn json(event: Event) -> serde_json::Map<String, serde_json::Value> {
    match serde_json::to_value(Line { time_s: 0.0, rank: 0, event }).unwrap() {
        serde_json::Value::Object(fields) => fields,
        other => panic!("an event is an object, not {other}"),
    }
}

/// The fields of an object, or of the objects of a list.
fn object(value: &serde_json::Value) -> Option<&serde_json::Map<String, serde_json::Value>> {
    value.as_array().and_then(|list| list.first()).unwrap_or(value).as_object()
}

/// The part of the page under the heading of an event, up to the next heading.
fn part(name: &str) -> &'static str {
    let heading = format!("\n## `{name}`\n");
    let start = DOC.find(&heading).unwrap_or_else(|| panic!("docs/events.md has no heading for `{name}`"));
    let body = &DOC[start + heading.len()..];
    body.find("\n## ").map_or(body, |end| &body[..end])
}

#[test]
fn the_page_names_every_event_and_every_field() {
    for event in all_events() {
        let fields = json(event);
        let name = fields["event"].as_str().unwrap();
        for (field, value) in &fields {
            let place = if ["time_s", "rank", "event"].contains(&field.as_str()) { DOC } else { part(name) };
            assert!(place.contains(&format!("| `{field}` |")), "docs/events.md does not name `{field}` of `{name}`");
            for inner in object(value).into_iter().flat_map(|inner| inner.keys()) {
                assert!(place.contains(&format!("| `{field}.{inner}` |")), "`{field}.{inner}` of `{name}`");
            }
        }
    }
    assert!(DOC.contains(&format!("Version {SCHEMA_VERSION}")));
}

#[test]
fn the_page_names_no_field_that_is_not_written() {
    for event in all_events() {
        let fields = json(event);
        let name = fields["event"].as_str().unwrap();
        for row in part(name).lines().filter_map(|line| line.strip_prefix("| `")) {
            let field = row.split('`').next().unwrap();
            let known = match field.split_once('.') {
                Some((outer, inner)) => object(&fields[outer]).is_some_and(|found| found.contains_key(inner)),
                None => fields.contains_key(field),
            };
            assert!(known, "docs/events.md has `{field}` under `{name}`, which is never written");
        }
    }
}

#[test]
fn the_pages_examples_are_whole_events_of_every_kind() {
    let examples: Vec<&str> = DOC.lines().filter(|line| line.starts_with('{')).collect();
    let mut shown = BTreeSet::new();
    for example in examples {
        let line: Line = serde_json::from_str(example).unwrap_or_else(|error| panic!("{error}: {example}"));
        let read: serde_json::Value = serde_json::from_str(example).unwrap();
        assert_eq!(serde_json::to_value(&line).unwrap(), read, "nothing unknown, nothing left out");
        shown.insert(json(line.event)["event"].as_str().unwrap().to_owned());
    }
    let all: BTreeSet<String> =
        all_events().into_iter().map(|event| json(event)["event"].as_str().unwrap().to_owned()).collect();
    assert_eq!(shown, all);
}
