//! A server and those who ask it, over loopback.

use std::io::{Read, Write};
use std::net::TcpStream;

use paceline_comm::wire::greet;

use super::super::{Client, What};
use super::*;
use crate::spec::Address;

/// A server whose items are their own numbers, a few million of them for each number of the validation half; calls `with` beside it.
fn serving(tls: bool, with: impl FnOnce(&Address, &Token)) -> Vec<String> {
    let token = Token::random();
    let options = ServerOptions { token: token.clone(), tls: tls.then(|| Tls::from_token(&token)) };
    let server = Server::bind("127.0.0.1:0", options, |question| match question.what {
        What::Listing => Answer::Bytes(b"a list".to_vec()),
        What::Train(9) => Answer::Damaged("it is torn".into()),
        What::Train(number) => Answer::Bytes(number.to_le_bytes().to_vec()),
        What::Val(number) => Answer::Bytes(vec![number as u8; 1_500_000 * number as usize]),
    });
    let server = server.unwrap();
    let address = Address::parse(&server.address().unwrap().to_string()).unwrap();
    let stop = signal::Stop::new();
    std::thread::scope(|scope| {
        let mut said = Vec::new();
        let asked = stop.clone();
        let serving = scope.spawn(move || {
            server.serve(&asked, &mut |sentence| said.push(sentence.to_owned()));
            said
        });
        with(&address, &token);
        stop.request();
        serving.join().unwrap()
    })
}

fn client(address: &Address, token: &Token, tls: bool) -> Client {
    Client::new(address.clone(), token.clone(), tls.then(|| Tls::from_token(token)), Stop::new())
}

fn question(what: What) -> Question {
    Question { what, bytes_max: 8 << 20, list: 0 }
}

#[test]
fn several_threads_ask_at_once_plain_and_secret() {
    for tls in [false, true] {
        let said = serving(tls, |address, token| {
            let client = client(address, token, tls);
            assert_eq!(client.ask(&question(What::Listing)).unwrap(), Answer::Bytes(b"a list".to_vec()));
            assert_eq!(client.ask(&question(What::Train(9))).unwrap(), Answer::Damaged("it is torn".into()));
            std::thread::scope(|scope| {
                for thread in 0..4u64 {
                    let client = &client;
                    scope.spawn(move || {
                        for number in (100 * thread..).take(50).filter(|&number| number != 9) {
                            let found = client.ask(&question(What::Train(number))).unwrap();
                            assert_eq!(found, Answer::Bytes(number.to_le_bytes().to_vec()));
                        }
                        let found = client.ask(&question(What::Val(thread))).unwrap();
                        assert_eq!(found, Answer::Bytes(vec![thread as u8; 1_500_000 * thread as usize]));
                    });
                }
            });
            let asked = Question { what: What::Val(1), bytes_max: 10, list: 0 };
            let Answer::Failed(why) = client.ask(&asked).unwrap() else { panic!("too long") };
            assert!(why.contains("10 may come"), "{why}");
        });
        assert!(said.is_empty(), "{said:?}");
    }
}

#[test]
fn whoever_has_no_token_or_keeps_another_secret_is_told_so() {
    let said = serving(false, |address, token| {
        let other = client(address, &Token::random(), false).ask(&question(What::Listing)).unwrap_err();
        assert!(other.to_string().contains("token"), "{other}");
        let secret = client(address, token, true).ask(&question(What::Listing));
        assert!(secret.is_err());
        // Nonsense and silence keep nobody else from being answered.
        let mut stranger = TcpStream::connect((address.host.as_str(), address.port)).unwrap();
        stranger
            .write_all(b"GET / HTTP/1.1\r\n\r\nHost: anywhere, and some more bytes to fill a greeting with")
            .unwrap();
        let _silent = TcpStream::connect((address.host.as_str(), address.port)).unwrap();
        assert!(client(address, token, false).ask(&question(What::Listing)).is_ok());
        stranger.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut end = Vec::new();
        let _ = stranger.read_to_end(&mut end);
    });
    assert!(!said.is_empty(), "who was turned away is reported");
}

/// A server by hand: each connection is greeted, answers one question with these frames, and is closed.
fn brief(answers: Vec<Vec<(u16, Vec<u8>)>>, with: impl FnOnce(&Client)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::parse(&listener.local_addr().unwrap().to_string()).unwrap();
    let token = Token::random();
    std::thread::scope(|scope| {
        let own = token.clone();
        scope.spawn(move || {
            for frames in answers {
                let (stop, mut socket) = (Stop::new(), Socket::Plain(listener.accept().unwrap().0));
                greet(&mut socket, &identity(&own, Role::Listener), &Wait::new(Duration::from_secs(10), &stop))
                    .unwrap();
                let talk = Talk { rank: SERVER, peer: ASKER.into(), phase: "test" };
                let mut line = Line { framed: Framed::new(socket, 100), talk };
                line.next(Duration::from_secs(10), &stop).unwrap();
                frames.iter().for_each(|(kind, payload)| line.send(*kind, payload, &stop).unwrap());
            }
        });
        with(&client(&address, &token, false));
    });
}

#[test]
fn a_connection_that_ended_is_dialled_anew_and_a_server_that_is_gone_is_named() {
    let answer = |byte| vec![(HEAD, Head::Bytes(1).encode()), (PIECE, vec![byte])];
    brief(vec![answer(7), answer(8)], |client| {
        assert_eq!(client.ask(&question(What::Listing)).unwrap(), Answer::Bytes(vec![7]));
        assert_eq!(client.ask(&question(What::Listing)).unwrap(), Answer::Bytes(vec![8]), "over a new connection");
        let gone = client.ask(&question(What::Listing)).unwrap_err().to_string();
        // Whoever is about to leave may still let somebody in whom it does not greet any more.
        assert!(gone.contains("connecting") || gone.contains("in greeting"), "{gone}");
    });
}

#[test]
fn an_answer_that_is_none_is_an_error() {
    for frames in [
        vec![(HEAD, Head::Bytes(u64::MAX).encode())],
        vec![(PIECE, vec![1])],
        vec![(HEAD, Head::Bytes(2).encode()), (PIECE, vec![1; 3])],
        vec![(HEAD, Head::Bytes(2).encode()), (PIECE, vec![1])],
        vec![(HEAD, Head::Bytes(2).encode())],
        vec![(HEAD, vec![])],
        vec![],
    ] {
        let found = frames.clone();
        brief(vec![frames], |client| assert!(client.ask(&question(What::Train(1))).is_err(), "{found:?}"));
    }
}
