//! Boxes and clients over sockets and mapped memory.

use std::net::TcpStream;

use super::super::{BoxClient, ClientOptions, Key, LentRegion, Stripes};
use super::*;

const MB: u64 = 1 << 20;

/// A box on a thread, which ends with the value.
struct Running {
    address: SocketAddr,
    token: Token,
    stop: Stop,
    thread: Option<std::thread::JoinHandle<Arc<Shared>>>,
    shared: Arc<Shared>,
}

impl Running {
    fn start(limits: Limits, secret: bool) -> Self {
        Self::start_with(&Token::random(), limits, secret)
    }

    fn start_with(token: &Token, limits: Limits, secret: bool) -> Self {
        let token = token.clone();
        let tls = secret.then(|| Tls::from_token(&token));
        let options = ServerOptions { token: token.clone(), tls, pool_bytes: 4 * MB, limits };
        let server = BoxServer::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let (address, stop, shared) = (server.address().unwrap(), server.stop(), Arc::clone(&server.shared));
        let body = move || {
            server.serve(&mut || false, &mut |_| {});
            Arc::clone(&server.shared)
        };
        let thread = Some(threads::spawn("box", body).unwrap());
        Self { address, token, stop, thread, shared }
    }

    fn options(&self, maps: bool) -> ClientOptions {
        ClientOptions { maps, ..ClientOptions::new(&self.token) }
    }

    fn client(&self, maps: bool) -> BoxClient {
        let client = BoxClient::connect(self.address, &self.options(maps)).unwrap();
        assert_eq!(client.is_mapped(), maps);
        client
    }

    fn key(&self, name: &str) -> Key {
        Key::derive(&self.token, name)
    }

    /// Until so many clients are known; a connection that ended is noticed by the system's word, not at once.
    fn wait_for_clients(&self, count: u64) {
        let wait = Wait::new(Duration::from_secs(20), &Stop::new());
        while locked(&self.shared.state).usage().clients != count {
            assert!(!wait.left().is_zero(), "still {:?}", locked(&self.shared.state).usage());
            paceline_system::clock::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.set("the test is over");
        self.thread.take().map(|thread| thread.join().unwrap());
    }
}

fn limits() -> Limits {
    Limits { bytes_max: 512 * MB, client_bytes_max: 256 * MB, regions_max: 100 }
}

/// The ways to reach a box: by mapped memory, one socket, three of them, encrypted.
fn ways(check: impl Fn(&Running, &dyn Fn() -> BoxClient)) {
    let running = Running::start(limits(), false);
    check(&running, &|| running.client(true));
    check(&running, &|| running.client(false));
    let sockets = ClientOptions { sockets: 3, ..running.options(false) };
    check(&running, &|| BoxClient::connect(running.address, &sockets).unwrap());
    let secret = Running::start(limits(), true);
    let tls = Some(Tls::from_token(&secret.token));
    let options = ClientOptions { tls, ..secret.options(false) };
    check(&secret, &|| BoxClient::connect(secret.address, &options).unwrap());
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    (0..length).map(|index| (paceline_system::random::key(&[seed, index as u64]) & 0xff) as u8).collect()
}

#[test]
fn what_is_written_is_read_everywhere() {
    ways(|running, connect| {
        let (one, other) = (connect(), connect());
        let key = running.key("everywhere");
        let length = 5 * MB as usize + 12_345;
        let region = one.create(&key, length as u64).unwrap();
        let seen = other.attach(&key).unwrap();
        let mut model = vec![0; length];
        let mut found = vec![1; length];
        other.read(&seen, 0, &mut found).unwrap();
        assert_eq!(found, model, "it begins with zeros");
        for (nth, (at, count)) in [
            (0, length),
            (1, 1),
            (65_535, 2),
            (70_000, 300_000),
            (length - 1, 1),
            (0, 8),
            (MB as usize, 3 * MB as usize),
        ]
        .into_iter()
        .enumerate()
        {
            let written = bytes(nth as u64, count);
            let version = one.write(&region, at as u64, &written).unwrap();
            assert_eq!(version, nth as u64 + 1);
            model[at..at + count].copy_from_slice(&written);
            assert_eq!(other.read(&seen, 0, &mut found).unwrap(), version);
            assert!(found == model, "after a write of {count} bytes at {at}");
            let mut part = vec![0; count];
            other.read(&seen, at as u64, &mut part).unwrap();
            assert_eq!(part, written);
        }
        one.free(&region).unwrap();
        assert!(other.attach(&key).is_err());
    });
}

fn numbers(client: &BoxClient, region: &LentRegion, count: usize) -> Vec<f32> {
    let mut found = vec![0f32; count];
    client.read(region, 0, bytemuck::cast_slice_mut(&mut found)).unwrap();
    found
}

#[test]
fn numbers_are_added_in_the_box() {
    ways(|running, connect| {
        let client = connect();
        let count = 200_003;
        let bytes = 4 * count as u64;
        let target = client.create(&running.key("target"), bytes).unwrap();
        let source = client.create(&running.key("source"), bytes + 400_000).unwrap();
        let values: Vec<f32> = (0..count).map(|index| index as f32 - 7.5).collect();
        client.write(&source, 300_000, bytemuck::cast_slice(&values)).unwrap();
        client.accumulate((&target, 0), (&source, 300_000), bytes, 2.0).unwrap();
        client.add(&target, 4 * 100, &values[..50_000], -1.0).unwrap();
        client.add(&target, 0, &[1000.0], 0.5).unwrap();
        let mut expected: Vec<f32> = values.iter().map(|value| 2.0 * value).collect();
        (0..50_000).for_each(|index| expected[100 + index] -= values[index]);
        expected[0] += 500.0;
        assert!(numbers(&client, &target, count) == expected);
        let part = (0..10).map(|_| client.fetch_add(&source, 0, 3).unwrap()).collect::<Vec<i64>>();
        assert_eq!(part, (0..10).map(|nth| 3 * nth).collect::<Vec<i64>>());
        client.free(&target).unwrap();
        client.free(&source).unwrap();
    });
}

#[test]
fn what_many_add_at_once_is_all_there() {
    let running = Running::start(limits(), false);
    let key = running.key("sum");
    let count = 100_000;
    let owner = running.client(true);
    let region = owner.create(&key, 4 * count as u64).unwrap();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (running, key) = (&running, key);
            scope.spawn(move || {
                let client = running.client(worker % 2 == 0);
                let (region, ones) = (client.attach(&key).unwrap(), vec![1f32; count]);
                for nth in 0..20 {
                    let at = if nth % 2 == 0 { 0 } else { count / 2 };
                    client.add(&region, 4 * at as u64, &ones[at..], 1.0).unwrap();
                    // Whoever reads sees whole sums: all numbers of a half have been added to equally often.
                    let seen = numbers(&client, &region, count);
                    assert!(seen[..count / 2].windows(2).all(|pair| pair[0] == pair[1]));
                    assert!(seen[count / 2..].windows(2).all(|pair| pair[0] == pair[1]));
                }
            });
        }
    });
    let found = numbers(&owner, &region, count);
    assert!(found[..count / 2].iter().all(|&sum| sum == 40.0) && found[count / 2..].iter().all(|&sum| sum == 80.0));
    assert_eq!(owner.wait(&region, 80, Duration::from_secs(1)).unwrap(), 80);
}

#[test]
fn a_client_that_dies_in_the_middle_of_a_write_has_changed_nothing() {
    let running = Running::start(limits(), false);
    let key = running.key("whole");
    let owner = running.client(true);
    let region = owner.create(&key, 4 * MB).unwrap();
    owner.write(&region, 0, &vec![1; 4 * MB as usize]).unwrap();
    // Half of what it announces, by hand.
    let mut stream = TcpStream::connect(running.address).unwrap();
    let wait = Wait::new(Duration::from_secs(20), &Stop::new());
    crate::wire::greet(&mut stream, &identity(&running.token, Role::Dialler), &wait).unwrap();
    let talk = Talk { rank: BORROWER, peer: BOX.into(), phase: "a test" };
    let mut line = Line::new(Box::new(stream), None, (talk, Stop::new())).unwrap();
    use super::super::talk::{Message, Span};
    line.say(Message::Hello { secret: [0; 16] }.encode()).unwrap();
    line.reply(Duration::from_secs(20)).unwrap();
    line.say(Message::Ask(Ask::Attach { key }).encode()).unwrap();
    line.reply(Duration::from_secs(20)).unwrap();
    let span = Span { at: 0, bytes: 4 * MB };
    let message = Message::Write { region: 1, span, scale: None };
    let half = vec![2; 2 * MB as usize];
    line.send(message.encode(), span.bytes, |say| say(&half)).unwrap();
    running.wait_for_clients(2);
    drop(line);
    running.wait_for_clients(1);
    let mut found = vec![0; 4 * MB as usize];
    assert_eq!(owner.read(&region, 0, &mut found).unwrap(), 1);
    assert!(found.iter().all(|&byte| byte == 1));
    assert_eq!(owner.write(&region, 0, &[3]).unwrap(), 2);
}

#[test]
fn what_the_last_client_leaves_is_given_back_unless_it_is_kept() {
    let running = Running::start(limits(), false);
    let watcher = running.client(false);
    {
        let client = running.client(true);
        client.create(&running.key("passing"), MB).unwrap();
        client.create_kept(&running.key("kept"), MB).unwrap();
        assert_eq!(watcher.usage().unwrap().regions, 2);
    }
    running.wait_for_clients(1);
    assert_eq!(watcher.usage().unwrap().regions, 1);
    let kept = watcher.attach(&running.key("kept")).unwrap();
    watcher.free(&kept).unwrap();
    assert_eq!(watcher.usage().unwrap().used, 0);
}

#[test]
fn a_wrong_token_a_wrong_key_and_a_full_box_are_told() {
    let running = Running::start(Limits { bytes_max: 2 * MB, ..limits() }, false);
    let stranger = ClientOptions::new(&Token::random());
    assert!(BoxClient::connect(running.address, &stranger).is_err());
    let client = running.client(true);
    let error = client.create(&running.key("large"), 3 * MB).unwrap_err();
    assert!(error.to_string().contains("--limit"), "{error}");
    client.create(&running.key("small"), MB).unwrap();
    let wrong = Key { secret: [1; 16], ..running.key("small") };
    let error = running.client(false).attach(&wrong).unwrap_err();
    assert!(error.to_string().contains("no region is open to this key"), "{error}");
}

#[test]
fn whoever_waits_hears_of_a_change_of_another() {
    let running = Running::start(limits(), false);
    let key = running.key("bell");
    let (one, other) = (running.client(true), running.client(false));
    let region = one.create(&key, 64).unwrap();
    let seen = other.attach(&key).unwrap();
    assert_eq!(other.wait(&seen, 1, Duration::from_millis(30)).unwrap(), 0, "its time is over");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| other.wait(&seen, 2, Duration::from_secs(20)).unwrap());
        one.notify(&region).unwrap();
        one.write(&region, 0, &[1]).unwrap();
        assert_eq!(waits.join().unwrap(), 2);
    });
}

#[test]
fn several_boxes_are_one() {
    let token = Token::random();
    let boxes: Vec<Running> = (0..3).map(|_| Running::start_with(&token, limits(), false)).collect();
    let addresses: Vec<SocketAddr> = boxes.iter().map(|running| running.address).collect();
    for (count, maps) in [(1, true), (2, true), (3, false)] {
        let connect = || Stripes::connect(&addresses[..count], &boxes[0].options(maps)).unwrap();
        let (one, other) = (connect(), connect());
        let (key, delta) = (boxes[0].key("striped"), boxes[0].key("delta"));
        let length = 7 * MB + 44;
        let region = one.create(&key, length).unwrap();
        let written: Vec<f32> = (0..length / 4).map(|index| index as f32).collect();
        one.write(&region, 0, bytemuck::cast_slice(&written)).unwrap();
        let seen = other.attach(&key, length).unwrap();
        assert!(other.attach(&key, length + 4).is_err() && other.attach(&delta, length).is_err());
        let mut found = vec![0f32; written.len()];
        other.read(&seen, 0, bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert!(found == written);
        let mut part = vec![0f32; MB as usize];
        other.read(&seen, 2 * MB - 400, bytemuck::cast_slice_mut(&mut part)).unwrap();
        assert!(part == written[MB as usize / 2 - 100..][..MB as usize]);
        let ones = other.create(&delta, length).unwrap();
        other.write(&ones, 0, bytemuck::cast_slice(&vec![1f32; written.len()])).unwrap();
        other.accumulate(&seen, &ones, (0, length), 0.5).unwrap();
        one.read(&region, 0, bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert!(found.iter().zip(&written).all(|(found, written)| *found == written + 0.5));
        one.free(&region).unwrap();
        other.free(&ones).unwrap();
    }
}

#[test]
fn several_boxes_add_count_and_keep_as_one() {
    let token = Token::random();
    let boxes: Vec<Running> = (0..3).map(|_| Running::start_with(&token, limits(), false)).collect();
    let addresses: Vec<SocketAddr> = boxes.iter().map(|running| running.address).collect();
    let connect = |count: usize| Stripes::connect(&addresses[..count], &boxes[0].options(false)).unwrap();
    for count in 1..=3 {
        let (one, other) = (connect(count), connect(count));
        let key = Key::named("kept", [count as u8; 16]);
        let length = 5 * MB + 8;
        let region = one.create_kept(&key, length).unwrap();
        let seen = other.find(&key).unwrap();
        assert_eq!((seen.bytes(), other.count()), (length, count));
        assert!(other.find(&Key::named("kept", [0; 16])).is_err());
        let numbers: Vec<f32> = (0..length / 4 - 3).map(|index| (index % 4096) as f32).collect();
        one.add(&region, 12, &numbers, 1.0).unwrap();
        other.add(&seen, 12, &numbers, 2.0).unwrap();
        let mut found = vec![0f32; numbers.len()];
        one.read(&region, 12, bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert!(found.iter().zip(&numbers).all(|(found, number)| *found == 3.0 * number));
        one.write(&region, 0, &vec![0; length as usize]).unwrap();
        for at in [0, MB, 3 * MB - 8, length - 8] {
            assert_eq!(one.fetch_add(&region, at, 5 + at as i64).unwrap(), 0);
            let mut number = [0; 8];
            other.read(&seen, at, &mut number).unwrap();
            assert_eq!(i64::from_le_bytes(number), 5 + at as i64, "at {at} of {count}");
        }
        let version = one.notify(&region).unwrap();
        assert_eq!(other.wait(&seen, version, Duration::from_secs(20)).unwrap(), version);
        let used = boxes[..count].iter().map(|running| locked(&running.shared.state).usage().used).sum::<u64>();
        assert_eq!(one.usage().unwrap().used, used);
        other.free(&seen).unwrap();
        assert!(one.find(&key).is_err());
    }
}

#[test]
fn a_region_that_one_of_several_boxes_cannot_make_is_at_none() {
    let token = Token::random();
    let small = Limits { bytes_max: MB, ..limits() };
    let boxes = [limits(), small, limits()].map(|limits| Running::start_with(&token, limits, false));
    let addresses: Vec<SocketAddr> = boxes.iter().map(|running| running.address).collect();
    let client = Stripes::connect(&addresses, &boxes[0].options(true)).unwrap();
    let error = client.create_kept(&boxes[0].key("large"), 9 * MB).unwrap_err();
    assert_eq!(No::of(&error), Some(No::Full), "{error}");
    assert_eq!(client.usage().unwrap().regions, 0);
    client.create(&boxes[0].key("large"), 2 * MB).unwrap();
}

#[test]
fn threads_that_share_a_client_read_and_write_whole_versions() {
    ways(|running, connect| {
        let client = connect();
        let region = client.create(&running.key("shared"), 300_000).unwrap();
        std::thread::scope(|scope| {
            for writer in 1..=2u8 {
                let (client, region) = (&client, &region);
                scope.spawn(move || {
                    for nth in 0..20 {
                        client.write(region, 0, &vec![writer + 2 * nth; 300_000]).unwrap();
                    }
                });
                scope.spawn(move || {
                    let mut found = vec![0; 300_000];
                    for _ in 0..20 {
                        client.read(region, 0, &mut found).unwrap();
                        assert!(found.iter().all(|byte| *byte == found[0]), "a read is of one version");
                    }
                });
            }
        });
        client.free(&region).unwrap();
    });
}
