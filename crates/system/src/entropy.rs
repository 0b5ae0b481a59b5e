//! Entropy from the operating system: for tokens and nonces, which must not be guessed. Everything else draws from
//! [`crate::random`], which can be replayed.

/// Random bytes nobody can predict.
///
/// # Panics
/// When the kernel has no entropy to give, which on a running system does not happen.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the kernel gives no entropy: {error}"),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_draws_differ() {
        assert_ne!(bytes::<32>(), bytes::<32>());
    }
}
