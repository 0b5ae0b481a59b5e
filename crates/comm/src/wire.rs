//! What travels: bounded frames, the streams that carry them, and the greeting that opens every connection.

pub mod frame;
pub mod framed;
pub mod hello;
pub mod lobby;
pub(crate) mod passing;
pub mod socket;
pub mod stream;
pub mod tls;

pub use frame::{Decoder, Frame, WireError};
pub use framed::Framed;
pub use hello::{Identity, Peer, Purpose, Role, greet};
pub use lobby::Lobby;
pub use socket::Socket;
pub use stream::Stream;
pub use tls::Tls;
