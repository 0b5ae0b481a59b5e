//! Data on other machines: `data` says what is asked for, `cluster` carries it, and here they meet.

use std::sync::Arc;

use super::team::{secrecy, variables};
use crate::cluster::samples::{Answer, Client, LISTING_BYTES_MAX, Question, ServerOptions, What};
use crate::cluster::spec::Address;
use crate::cluster::token;
use crate::comm::Stop;
use crate::data::far::{Elsewhere, Far, Lender, Listing};
use crate::data::{DataError, Split};
use crate::failure::Failure;

/// The way to those who lend samples; `tls` is what a run says of its connections.
pub fn elsewhere(tls: Option<String>) -> Elsewhere {
    Elsewhere::new(move |address| {
        let refused = |error: &dyn std::fmt::Display| DataError::Refused(format!("remote:{address}: {error}"));
        let place = Address::parse(address).map_err(|error| refused(&error))?;
        let options = options(tls.as_deref()).map_err(|failure| refused(&failure.into_error()))?;
        Ok(Arc::new(Remote(Client::new(place, options.token, options.tls, Stop::new()))))
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
    match lender.read(half, number, question.bytes_max) {
        Ok(Ok(bytes)) => Answer::Bytes(bytes),
        Ok(Err(problem)) => Answer::Damaged(problem),
        Err(error) => Answer::Failed(error.to_string()),
    }
}

/// Somebody who lends samples, at the other end of connections.
#[derive(Debug)]
struct Remote(Client);

impl Remote {
    fn failed(&self, problem: impl ToString) -> DataError {
        DataError::Far { place: self.0.address().to_string(), problem: problem.to_string() }
    }
}

impl Far for Remote {
    fn listing(&self) -> Result<Listing, DataError> {
        let refused = |problem: String| {
            let place = self.0.address();
            DataError::Refused(format!(
                "no data can be had from {place}: {problem}; start `paceline data serve folder:DIR --listen {place}` there, \
                 with the same token file"
            ))
        };
        let question = Question { what: What::Listing, bytes_max: LISTING_BYTES_MAX };
        match self.0.ask(&question).map_err(|error| refused(error.to_string()))? {
            Answer::Bytes(bytes) => Listing::decode(&bytes).map_err(refused),
            Answer::Damaged(problem) | Answer::Failed(problem) => Err(refused(problem)),
        }
    }

    fn read(&self, half: Split, number: usize, bytes_max: u64) -> Result<Result<Vec<u8>, String>, DataError> {
        let number = number as u64;
        let what = if half == Split::Train { What::Train(number) } else { What::Val(number) };
        match self.0.ask(&Question { what, bytes_max }).map_err(|error| self.failed(error))? {
            Answer::Bytes(bytes) => Ok(Ok(bytes)),
            Answer::Damaged(problem) => Ok(Err(problem)),
            Answer::Failed(problem) => Err(self.failed(problem)),
        }
    }
}
