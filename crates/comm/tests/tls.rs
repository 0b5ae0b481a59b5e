//! Secret connections: who may open one, who may not, and what both sides are told.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use paceline_comm::transport::{Membership, tcp};
use paceline_comm::wire::{Identity, Peer, Purpose, Role, Socket, Tls, greet};
use paceline_comm::{CommError, Generation, Rank, RunId, Stop, Token, Wait};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

fn wait() -> Wait {
    Wait::new(Duration::from_secs(10), &Stop::new())
}

/// Rank 1 dials rank 0; how it went for the one that dialled and for the other.
fn meet(dials: Option<&Tls>, answers: Option<&Tls>) -> [Result<Peer, CommError>; 2] {
    let token = Token::random();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let identity = |role, rank| Identity::new(&token, Purpose::Control, role, Rank(rank), 2);
    thread::scope(|scope| {
        let answering = scope.spawn(|| {
            let mut socket = Socket::accepted(listener.accept().unwrap().0, answers).unwrap();
            greet(&mut socket, &identity(Role::Listener, 0), &wait())
        });
        let mut socket = Socket::dialled(TcpStream::connect(address).unwrap(), dials).unwrap();
        let dialled = greet(&mut socket, &identity(Role::Dialler, 1), &wait());
        drop(socket);
        [dialled, answering.join().unwrap()]
    })
}

fn meets(dials: Option<&Tls>, answers: Option<&Tls>) {
    let [dialled, answered] = meet(dials, answers);
    assert_eq!((dialled.unwrap().rank, answered.unwrap().rank), (Rank(0), Rank(1)));
}

/// Both sides say in a sentence that they do not encrypt alike; neither waits for its deadline.
fn refused(dials: Option<&Tls>, answers: Option<&Tls>) {
    let start = std::time::Instant::now();
    let outcomes = meet(dials, answers);
    let said: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(said.iter().any(|said| said.contains("do not encrypt alike")), "{said:?}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn holders_of_a_token_meet_in_secret_and_others_do_not() {
    let (token, other) = (Token::random(), Token::random());
    let (one, same, another) = (Tls::from_token(&token), Tls::from_token(&token), Tls::from_token(&other));
    meets(Some(&one), Some(&same));
    refused(Some(&one), Some(&another));
    refused(Some(&one), None);
    refused(None, Some(&one));
    meets(None, None);
}

/// An authority, and certificates that it has signed.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The texts of a certificate for this name, and of its key.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn tls(&self, name: &str) -> Tls {
        let (certificate, key) = self.sign(name);
        Tls::from_pem(certificate.as_bytes(), key.as_bytes(), self.0.pem().as_bytes()).unwrap()
    }
}

#[test]
fn certificates_of_one_authority_are_believed_and_others_are_not() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (one, two) = (ours.tls("a.example"), ours.tls("10.0.0.2"));
    meets(Some(&one), Some(&two));
    refused(Some(&one), Some(&theirs.tls("a.example")));
    refused(Some(&one), None);
    refused(Some(&Tls::from_token(&Token::random())), Some(&one));
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let authority = Authority::new();
    let (certificate, key) = authority.sign("a");
    let (_, other_key) = authority.sign("b");
    let root = authority.0.pem();
    for (certificate, key, root, words) in [
        ("", key.as_str(), root.as_str(), "the certificate holds no certificate"),
        (certificate.as_str(), "nothing", root.as_str(), "the key is not PEM"),
        (certificate.as_str(), key.as_str(), "", "the authority holds no certificate"),
        (certificate.as_str(), other_key.as_str(), root.as_str(), "the certificate and the key cannot be used"),
    ] {
        let why = Tls::from_pem(certificate.as_bytes(), key.as_bytes(), root.as_bytes()).unwrap_err();
        assert!(why.contains(words), "{why}");
    }
}

#[test]
fn data_connections_that_were_turned_away_are_reported() {
    let token = Token::random();
    let listener = tcp::Listener::bind(Rank(1), None).unwrap();
    let address = listener.address();
    let (told, heard) = std::sync::mpsc::channel();
    let report = tcp::Report::new(move |sentence| told.send(sentence.to_owned()).unwrap());
    let config = tcp::Config { report, tls: Some(Tls::from_token(&token)), ..tcp::Config::default() };
    let member = Membership { token, run: RunId::UNKNOWN, rank: Rank(1), world: 2, generation: Generation(0) };
    let wait = Wait::new(Duration::from_secs(2), &Stop::new());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| tcp::connect(listener, &[address, address], &member, config, &wait));
        // A stranger, and one who holds the token but does not encrypt.
        let mut plain = Socket::Plain(TcpStream::connect(address).unwrap());
        let identity = Identity::new(&member.token, Purpose::Data, Role::Dialler, Rank(0), 2);
        assert!(greet(&mut plain, &identity, &wait).is_err());
        let said = heard.recv_timeout(Duration::from_secs(2)).unwrap();
        assert!(said.contains("refused 127.0.0.1:") && said.contains("do not encrypt alike"), "{said}");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("waited") && error.peer() == Some(Rank(0)), "{error}");
    });
}
