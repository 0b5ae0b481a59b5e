//! What clients say to a memory box, and what a box answers.

use std::time::Duration;

use paceline_comm::memory_box::Limits;
use paceline_comm::memory_box::state::{Action, Event, MemoryBox};
use paceline_comm::memory_box::talk::{Answer, Ask, Key, Message, Reply};

const LIMITS: Limits = Limits { bytes_max: 1 << 24, client_bytes_max: 1 << 23, regions_max: 4 };

/// Messages one after the other, each a byte that says its kind and its client, and its fields: whatever they are, the box
/// answers each that asks something, holds its limits, and has everything back when its clients are gone. What is no
/// message may be a reply.
pub fn memory_box(mut bytes: &[u8]) {
    let mut state = MemoryBox::new(LIMITS);
    let key = Key { name: [1; 32], secret: [2; 16] };
    for client in [1, 2] {
        step(&mut state, Event::Came(client));
    }
    step(&mut state, Event::Asked(1, 1, Ask::Create { key, bytes: 200_000, keeps: false }));
    step(&mut state, Event::Asked(2, 2, Ask::Attach { key }));
    let mut call = 3;
    while let Some((&first, rest)) = bytes.split_first() {
        let (kind, client) = (u16::from(first & 0x1F), 1 + u64::from(first >> 7));
        let count = Message::fields(kind).unwrap_or(usize::from(first & 0xF)).min(rest.len());
        let (fields, next) = rest.split_at(count);
        bytes = next;
        if let Ok(reply) = Reply::decode(100 + kind, fields) {
            assert_eq!(Reply::decode(100 + kind, &reply.encode().1).map(|again| again.encode()), Ok(reply.encode()));
        }
        let Ok(Message::Ask(ask)) = Message::decode(kind, fields) else { continue };
        call += 1;
        let waits = matches!(ask, Ask::Watch { .. } | Ask::Commit { .. });
        let answered = step(&mut state, Event::Asked(client, call, ask)).contains(&call);
        assert!(answered || waits, "{ask:?} is not answered");
        assert!(state.usage().used <= LIMITS.bytes_max);
    }
    for client in [1, 2] {
        step(&mut state, Event::Left(client));
    }
    let kept = state.usage();
    assert!(kept.regions > 0 || kept.used == 0, "what nobody has is given back");
}

/// Does what follows from an event, and tells which calls were answered.
fn step(state: &mut MemoryBox, event: Event) -> Vec<u64> {
    let (mut answered, mut events) = (Vec::new(), vec![event]);
    while let Some(event) = events.pop() {
        for action in state.step(event, Duration::ZERO) {
            match action {
                Action::Answer(call, answer) => {
                    answered.push(call);
                    // Numbers are made known by being named in an answer; their places are inside.
                    if let Answer::Held { number, places, .. } = answer {
                        assert!(number > 0 && !places.is_empty());
                    }
                }
                Action::Run(call, job) => {
                    assert!((0..job.places.len()).all(|nth| job.covered(nth).end <= job.page));
                    events.push(Event::Computed(call));
                }
                Action::Discard(_) => {}
            }
        }
    }
    answered
}
