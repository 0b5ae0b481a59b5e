//! What comes over connections: frames, greetings, control messages, active messages, and what workers say to a parameter server.

use std::io::{self, Cursor, Read, Write};
use std::time::Duration;

use paceline_cluster::message::Message;
use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::transport::{Transport, thread};
use paceline_comm::wire::frame::Decoded;
use paceline_comm::wire::{Decoder, Identity, Purpose, Role, Stream, greet};
use paceline_comm::{Choice, Communicator, Link, Links, Options, Rank, Stop, Token, Wait};
use paceline_data::far::Listing;
use paceline_parallel::agree::{
    self, BucketShape, IDENTITY, Join, Opening, Push, Recipe, Roles, RoundOptions, ServerShard, Shape, dogwild,
    downpour, elastic, parameter_server, sandblaster,
};
use paceline_system::clock::Clock;
use paceline_system::threads;
use paceline_train::serve::ServerOptions;

const LIMIT: Duration = Duration::from_secs(2);

/// Frames in a row: none is longer than allowed, and nothing is asked for that would be.
pub fn frame(mut bytes: &[u8]) {
    const BYTES_MAX: u32 = 1000;
    let mut decoder = Decoder::new(BYTES_MAX);
    while let Ok(decoded) = decoder.decode(bytes) {
        match decoded {
            Decoded::Needs(needs) => {
                assert!(needs > bytes.len() && needs <= 24 + BYTES_MAX as usize);
                return;
            }
            Decoded::Frame { payload, taken, .. } => {
                assert!(payload.len() <= BYTES_MAX as usize && taken == payload.len() + 24);
                bytes = &bytes[taken..];
            }
        }
    }
}

/// A connection on which these bytes come, and then its end.
struct Deaf<'a>(Cursor<&'a [u8]>);

impl Read for Deaf<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Deaf<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for Deaf<'_> {
    fn set_timeouts(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn finish_writing(&mut self) {}

    fn address(&self) -> String {
        "anywhere".into()
    }
}

/// A greeting: nobody gets in who cannot prove to hold the token, and these bytes were made before it was drawn.
pub fn greeting(bytes: &[u8]) {
    for role in [Role::Listener, Role::Dialler] {
        let identity = Identity::new(&Token::random(), Purpose::Data, role, Rank(1), 4);
        let greeted = greet(&mut Deaf(Cursor::new(bytes)), &identity, &Wait::new(LIMIT, &Stop::new()));
        assert!(greeted.is_err(), "{greeted:?} got in");
    }
}

/// Active messages of a rank of a global address space, in frames that are in order and in any bytes.
pub fn global(bytes: &[u8]) {
    paceline_comm::global::challenge(bytes);
}

/// Questions to a server of samples, and its answers, in frames of any kind and length.
pub fn samples(bytes: &[u8]) {
    paceline_cluster::samples::challenge(bytes);
}

/// What a server of samples has: what was taken is taken again.
pub fn listing(bytes: &[u8]) {
    if let Ok(listing) = Listing::decode(bytes) {
        assert_eq!(Listing::decode(&listing.encode()).as_ref(), Ok(&listing));
    }
}

/// A control message: what was taken is taken again.
pub fn message(bytes: &[u8]) {
    for world in [1, 3] {
        if let Ok(message) = Message::decode(bytes, world) {
            assert_eq!(Message::decode(&message.encode(), world), Ok(message));
        }
    }
}

struct Nothing(Vec<f32>);

impl ServerShard for Nothing {
    fn apply(&mut self, push: Push<'_>) {
        assert_eq!(push.gradients.len(), push.weights.len());
    }

    fn resume(&mut self, _: usize, state: &[f32]) {
        self.0.copy_from_slice(state);
    }

    fn state(&mut self, _: usize) -> &mut [f32] {
        &mut self.0
    }
}

/// A server of a small model, and a worker that says whatever the bytes say: after facts and weights, records of how many numbers, with
/// which tag, and the numbers. The server ends when the worker is gone.
pub fn parameter_server(bytes: &[u8]) {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let staleness = Some(u64::from(first % 2));
    challenge(&parameter_server::RECIPE, agree::Options { staleness, ..agree::Options::default() }, bytes);
}

/// The same for servers of a centre, by every agreement that has one.
pub fn center(bytes: &[u8]) {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let with = |staleness, rounds| agree::Options { staleness, rounds, ..agree::Options::default() };
    let rounds = RoundOptions { period: Some(3), ..RoundOptions::default() };
    match first % 4 {
        0 => challenge(&elastic::RECIPE, with(None, rounds), bytes),
        1 => challenge(&elastic::RECIPE, with(Some(0), rounds), bytes),
        2 => challenge(&downpour::RECIPE, with(Some(2), RoundOptions::default()), bytes),
        _ => challenge(&dogwild::RECIPE, with(None, rounds), bytes),
    }
}

/// The same for a server of vectors, which a coordinator has commands for.
pub fn sandblaster(bytes: &[u8]) {
    let rounds = RoundOptions { history: Some(2), ..RoundOptions::default() };
    challenge(&sandblaster::RECIPE, agree::Options { rounds, ..agree::Options::default() }, bytes);
}

fn challenge(recipe: &dyn Recipe, agreement: agree::Options, bytes: &[u8]) {
    const PARAMETERS: usize = 7;
    let choice = Choice::by_cost(Links::uniform(2, Link::new(1e-5, 1e9)));
    let options = Options { timeout: LIMIT, stop: Stop::new(), choice };
    let mut ends =
        thread::mesh(2).into_iter().map(Transport::Thread).map(|end| Communicator::new(end, options.clone()));
    let (Some(worker), Some(mut server)) = (ends.next(), ends.next()) else { return };
    let bytes = bytes.to_vec();
    let opening = recipe.protocol(&Shape::default(), &agreement).opening;
    let talking = threads::spawn("worker", move || talk(worker, &bytes, (PARAMETERS, &opening)));
    let bucket = |start, elements| BucketShape { start, elements, ready_after: 0, needed_before: 0 };
    let buckets = vec![bucket(0, 4), bucket(4, 3)];
    let shape = Shape { buckets, parameters: PARAMETERS, states: 2, slots: 1, ..Shape::default() };
    // Whatever the worker says, the server ends well or says why not.
    if let Ok(told) = ServerOptions::receive(&mut server) {
        assert_eq!(ServerOptions::from_identity(told.identity()), Some(told));
        let join = Join {
            communicator: server,
            urgent: None,
            group: None,
            memory: None,
            lending: None,
            roles: Roles { workers: 1, servers: 1 },
            shape: &shape,
            options: agreement,
            deadline: LIMIT,
            clock: Clock::real(),
        };
        let _ = recipe.serve(join, &mut Nothing(vec![0.0; PARAMETERS]));
    }
    talking.expect("a thread").join().expect("the worker returns");
}

/// The worker. It stops at the first error: the server has ended.
fn talk(mut worker: Communicator, bytes: &[u8], (parameters, opening): (usize, &[Opening])) {
    let mut numbers = bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four));
    let of = |opening: &Opening| if *opening == Opening::States { 2 } else { parameters };
    for length in [2 * IDENTITY].into_iter().chain(opening.iter().map(of)) {
        let mut told: Vec<f32> = numbers.by_ref().take(length).collect();
        told.resize(length, 0.0);
        if worker.broadcast(Rank(0), &mut told).is_err() {
            return;
        }
    }
    let mut tags = [0, 1 << 48];
    while let Some(head) = numbers.next() {
        let [length, which, ..] = head.to_le_bytes();
        let tag = &mut tags[usize::from(which % 2)];
        *tag += 1;
        let mut told: Vec<f32> = numbers.by_ref().take(usize::from(length % 16)).collect();
        if told.is_empty() {
            return;
        }
        // Numbers, or the bytes that they are.
        if which >= 128 {
            let said: Vec<u8> = told.iter().flat_map(|number| number.to_le_bytes()).collect();
            match worker.send(Rank(1), *tag, &said) {
                Ok(()) => continue,
                Err(_) => return,
            }
        }
        let list = [Transfer { step: 0, action: Action::Send, peer: Rank(1), start: 0, length: told.len() }];
        if worker.exchange(&list, *tag, &mut told).is_err() {
            return;
        }
    }
}
