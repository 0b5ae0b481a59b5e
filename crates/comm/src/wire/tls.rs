//! What makes connections secret: TLS 1.3, both sides proving themselves.
//!
//! Without files, every process that holds the run's token derives the same key pair from it, and takes only that public key from
//! the other side (raw public keys, RFC 7250): no certificate has to be made, carried or trusted, and whoever cannot join cannot
//! listen. With files, both sides show a certificate that the same authority has signed; names in it are not compared, since
//! the greeting that follows proves by the token that the other side belongs to the run.

mod pinned;

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{AlwaysResolvesClientRawPublicKeys, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use sha2::Sha256;

use crate::token::Token;
use pinned::{AnyName, Pinned};

/// What a key pair is derived from, besides the token.
const LABEL: &[u8] = b"paceline tls key 1";

/// An Ed25519 key as PKCS #8 (RFC 8410) is this, and then the 32 bytes of its seed.
const PKCS8_ED25519: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// Plain bytes that one connection holds while the network takes no more.
const BUFFER_BYTES: usize = 256 << 10;

/// How both ends of connections prove themselves and keep others from listening. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(hidden)")
    }
}

impl Tls {
    /// With the key pair that follows from a token.
    ///
    /// # Panics
    /// When the library does not take a key of its own algorithm: a bug.
    pub fn from_token(token: &Token) -> Self {
        let provider = Arc::new(default_provider());
        let mut derive = Hmac::<Sha256>::new_from_slice(token.bytes()).expect("keys have any length");
        derive.update(LABEL);
        let key = [&PKCS8_ED25519[..], &derive.finalize().into_bytes()].concat();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key));
        let key = provider.key_provider.load_private_key(key).expect("thirty-two bytes are an Ed25519 key");
        let public = CertificateDer::from(key.public_key().expect("a private key has a public one").to_vec());
        let pair = Arc::new(CertifiedKey::new(vec![public.clone()], key));
        let pinned = Arc::new(Pinned::new(public, Arc::clone(&provider)));
        let client = client(&provider)
            .dangerous()
            .with_custom_certificate_verifier(pinned.clone())
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&pair))));
        let server = server(&provider)
            .with_client_cert_verifier(pinned)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(pair)));
        Self::new(client, server)
    }

    /// With a certificate chain, its key and the authority that signed both sides' certificates, as PEM texts.
    ///
    /// # Errors
    /// Which of the texts cannot be used, and why.
    pub fn from_pem(chain: &[u8], key: &[u8], authority: &[u8]) -> Result<Self, String> {
        let provider = Arc::new(default_provider());
        let certificates = |pem: &[u8], what: &str| -> Result<Vec<CertificateDer<'static>>, String> {
            let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            let found = found.map_err(|error| format!("the {what} is not PEM: {error}"))?;
            if found.is_empty() { Err(format!("the {what} holds no certificate")) } else { Ok(found) }
        };
        let chain = certificates(chain, "certificate")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key is not PEM: {error}"))?;
        let mut roots = RootCertStore::empty();
        for root in certificates(authority, "authority")? {
            roots.add(root).map_err(|error| format!("the authority cannot be used: {error}"))?;
        }
        let roots = Arc::new(roots);
        let unusable = |error: &dyn fmt::Display| format!("the authority cannot be used: {error}");
        let of_server = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build();
        let of_server: Arc<dyn ServerCertVerifier> = of_server.map_err(|error| unusable(&error))?;
        let of_client = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let client = client(&provider)
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyName(of_server)))
            .with_client_auth_cert(chain.clone(), key.clone_key());
        let server = server(&provider)
            .with_client_cert_verifier(of_client.map_err(|error| unusable(&error))?)
            .with_single_cert(chain, key);
        let unfit = |error: rustls::Error| format!("the certificate and the key cannot be used: {error}");
        Ok(Self::new(client.map_err(unfit)?, server.map_err(unfit)?))
    }

    fn new(mut client: ClientConfig, mut server: ServerConfig) -> Self {
        client.enable_sni = false;
        // Every connection is made once.
        client.resumption = rustls::client::Resumption::disabled();
        server.send_tls13_tickets = 0;
        Self { client: Arc::new(client), server: Arc::new(server) }
    }

    /// The side that dialled, or the other one.
    pub(super) fn begin(&self, dialled: bool) -> Result<Connection, rustls::Error> {
        let name = ServerName::try_from("paceline").expect("a name");
        let mut connection = match dialled {
            true => Connection::from(ClientConnection::new(Arc::clone(&self.client), name)?),
            false => Connection::from(ServerConnection::new(Arc::clone(&self.server))?),
        };
        connection.set_buffer_limit(Some(BUFFER_BYTES));
        Ok(connection)
    }
}

fn client(provider: &Arc<CryptoProvider>) -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    let builder = ClientConfig::builder_with_provider(Arc::clone(provider)).with_protocol_versions(&[&TLS13]);
    builder.expect("the library has TLS 1.3")
}

fn server(provider: &Arc<CryptoProvider>) -> rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier> {
    let builder = ServerConfig::builder_with_provider(Arc::clone(provider)).with_protocol_versions(&[&TLS13]);
    builder.expect("the library has TLS 1.3")
}
