//! How what processes send each other is kept secret.

use std::path::Path;

use super::FILE_BYTES_MAX;
use crate::comm::Token;
use crate::comm::wire::Tls;
use crate::failure::Failure;
use crate::system::disk::Disk;

/// How connections are kept secret: by the token, or by these files.
pub fn secrecy(files: &str, token: &Token) -> Result<Tls, Failure> {
    if files.is_empty() {
        return Ok(Tls::from_token(token));
    }
    let names: Vec<&str> = files.split(',').collect();
    let [certificate, key, authority] = names[..] else {
        return Err(Failure::refused(
            "--tls takes three files, such as --tls=rank.pem,rank.key,ca.pem, or none: --tls",
        ));
    };
    let read = |name: &str| Disk::real().read_within(Path::new(name), FILE_BYTES_MAX);
    let (certificate, key, authority) = (read(certificate)?, read(key)?, read(authority)?);
    Tls::from_pem(&certificate, &key, &authority).map_err(|error| Failure::refused(format!("--tls: {error}")))
}
