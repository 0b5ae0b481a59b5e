//! Data on other machines: `data` says what is asked for, `cluster` carries it, and here they meet.

use std::sync::{Arc, OnceLock};

use super::team::{secrecy, variables};
use crate::cluster::samples::{ANSWER_BYTES_MAX, Answer, Client, LISTING_BYTES_MAX, Question, ServerOptions, What};
use crate::cluster::spec::Address;
use crate::cluster::token;
use crate::comm::Stop;
use crate::data::far::{Elsewhere, Far, Lender, Listing};
use crate::data::{DataError, Split};
use crate::failure::Failure;
use crate::system::checksum::Checksum;

/// The way to those who lend samples; `tls` is what a run says of its connections.
pub fn elsewhere(tls: Option<String>) -> Elsewhere {
    Elsewhere::new(move |address| {
        let refused = |error: &dyn std::fmt::Display| DataError::Refused(format!("remote:{address}: {error}"));
        let place = Address::parse(address).map_err(|error| refused(&error))?;
        let options = options(tls.as_deref()).map_err(|failure| refused(&failure.into_error()))?;
        let client = Client::new(place, options.token, options.tls, Stop::new());
        Ok(Arc::new(Remote { client, list: OnceLock::new() }))
    })
}

/// What both ends have to agree on: the token of files, since a run's own is drawn anew by whoever launches it.
pub fn options(tls: Option<&str>) -> Result<ServerOptions, Failure> {
    let token = token::of_files(&variables())?;
    let tls = tls.map(|files| secrecy(files, &token)).transpose()?;
    Ok(ServerOptions { token, tls })
}

/// What a lender answers.
pub fn answer(lender: &Lender, listing: &[u8], question: &Question) -> Answer {
    let (half, number) = match question.what {
        What::Listing => return Answer::Bytes(listing.to_vec()),
        What::Train(number) => (Split::Train, number),
        What::Val(number) => (Split::Val, number),
    };
    if question.list != Checksum::of(listing).crc32c {
        return Answer::Failed(
            "its files are others than this run was told of; start the run again, with --resume".into(),
        );
    }
    match lender.read(half, number, question.bytes_max) {
        Ok(Ok(bytes)) => Answer::Bytes(bytes),
        Ok(Err(problem)) => Answer::Damaged(problem),
        Err(error) => Answer::Failed(error.to_string()),
    }
}

/// Somebody who lends samples, at the other end of connections.
#[derive(Debug)]
struct Remote {
    client: Client,
    /// The checksum of the listing that was read: numbers mean nothing in another.
    list: OnceLock<u32>,
}

impl Remote {
    fn failed(&self, problem: impl ToString) -> DataError {
        DataError::Far { place: self.client.address().to_string(), problem: problem.to_string() }
    }
}

impl Far for Remote {
    fn listing(&self) -> Result<Listing, DataError> {
        let refused = |problem: String| {
            let place = self.client.address();
            DataError::Refused(format!(
                "no data can be had from {place}: {problem}; start `paceline data serve folder:DIR --listen ADDRESS:{port}` there, \
                 with the same token file, and with --tls on both sides or on none",
                port = place.port
            ))
        };
        let question = Question { what: What::Listing, bytes_max: LISTING_BYTES_MAX, list: 0 };
        match self.client.ask(&question).map_err(|error| refused(error.to_string()))? {
            Answer::Bytes(bytes) => {
                let listing = Listing::decode(&bytes).map_err(refused)?;
                // Whoever lists again gets what was listed first, or nothing.
                self.list.get_or_init(|| Checksum::of(&bytes).crc32c);
                Ok(listing)
            }
            Answer::Damaged(problem) | Answer::Failed(problem) => Err(refused(problem)),
        }
    }

    fn read(&self, half: Split, number: usize, bytes_max: u64) -> Result<Result<Vec<u8>, String>, DataError> {
        let number = number as u64;
        let what = if half == Split::Train { What::Train(number) } else { What::Val(number) };
        let (list, bytes_max) = (self.list.get().copied().unwrap_or(0), bytes_max.min(ANSWER_BYTES_MAX));
        match self.client.ask(&Question { what, bytes_max, list }).map_err(|error| self.failed(error))? {
            Answer::Bytes(bytes) => Ok(Ok(bytes)),
            Answer::Damaged(problem) => Ok(Err(problem)),
            Answer::Failed(problem) => Err(self.failed(problem)),
        }
    }
}
