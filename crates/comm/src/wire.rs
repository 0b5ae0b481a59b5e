//! What travels: bounded frames, the streams that carry them, and the greeting that opens every connection.

pub mod frame;
pub mod framed;
pub mod hello;
pub mod stream;

pub use frame::{Decoder, Frame, WireError};
pub use framed::Framed;
pub use hello::{Identity, Peer, Purpose, greet};
pub use stream::Stream;
