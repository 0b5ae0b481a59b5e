//! What went wrong: the number that a call returns, and the sentence that its thread may ask for.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use paceline_cluster::ClusterError;
use paceline_comm::CommError;
use paceline_comm::memory_box::No;
use paceline_system::threads;

/// The numbers of `enum paceline_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// It is done.
    Ok = 0,
    /// An argument cannot be.
    Invalid = 1,
    /// The box says no.
    Refused = 2,
    /// There is no such region for this key.
    Unknown = 3,
    /// There is one of this name.
    Taken = 4,
    /// The box cannot be reached.
    Lost = 5,
    /// Time is over.
    Late = 6,
    /// A mistake of this library.
    Bug = 7,
}

/// Why a call has not done what was asked.
#[derive(Debug)]
pub struct Problem {
    /// Its kind.
    pub status: Status,
    /// For people.
    pub sentence: String,
}

impl Problem {
    /// Of a kind.
    pub fn new(status: Status, sentence: impl Into<String>) -> Self {
        Self { status, sentence: sentence.into() }
    }

    /// An argument that cannot be.
    pub fn invalid(sentence: impl Into<String>) -> Self {
        Self::new(Status::Invalid, sentence)
    }
}

impl From<CommError> for Problem {
    fn from(error: CommError) -> Self {
        let status = match (No::of(&error), &error) {
            (Some(No::Unknown), _) => Status::Unknown,
            (Some(No::Taken), _) => Status::Taken,
            (Some(No::Outside), _) => Status::Invalid,
            (Some(_), _) | (None, CommError::Failed { .. }) => Status::Refused,
            (None, error) if error.is_refusal() => Status::Refused,
            (None, _) => Status::Lost,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ClusterError> for Problem {
    fn from(error: ClusterError) -> Self {
        Self::invalid(error.to_string())
    }
}

thread_local! {
    /// What the last call of this thread has failed with. C has no other place for a sentence that needs no freeing.
    static LAST: RefCell<CString> = RefCell::default();
}

/// Does what a call is for, and keeps what is said if it fails. A panic ends here.
pub fn call(work: impl FnOnce() -> Result<(), Problem>) -> c_int {
    let outcome = threads::caught(work)
        .unwrap_or_else(|words| Err(Problem::new(Status::Bug, format!("Paceline has made a mistake: {words}"))));
    let (status, sentence) = match outcome {
        Ok(()) => (Status::Ok, String::new()),
        Err(Problem { status, sentence }) => (status, sentence),
    };
    let sentence = CString::new(sentence.replace('\0', "?")).unwrap_or_default();
    // A thread that is ending keeps no more sentences.
    let _ = LAST.try_with(|last| last.replace(sentence));
    status as c_int
}

/// The sentence of this thread's last call; empty if that was done. It is there until the next call.
pub fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use paceline_comm::Rank;

    use super::*;

    fn said() -> String {
        LAST.with(|last| CStr::to_string_lossy(&last.borrow()).into_owned())
    }

    #[test]
    fn a_panic_is_a_number_and_a_sentence() {
        assert_eq!(call(|| panic!("the {} is open", "box")), Status::Bug as c_int);
        assert_eq!(said(), "Paceline has made a mistake: the box is open");
        assert_eq!(call(|| Ok(())), Status::Ok as c_int);
        assert_eq!(said(), "");
        assert_eq!(call(|| Err(Problem::invalid("a zero\0in it"))), Status::Invalid as c_int);
        assert_eq!(said(), "a zero?in it");
    }

    #[test]
    fn what_a_box_says_has_its_number() {
        let said = |no: No| CommError::Failed { rank: Rank(0), phase: "memory box", what: no.to_string() };
        for (no, status) in [
            (No::Unknown, Status::Unknown),
            (No::Taken, Status::Taken),
            (No::Outside, Status::Invalid),
            (No::Full, Status::Refused),
            (No::Busy, Status::Refused),
        ] {
            assert_eq!(Problem::from(said(no)).status, status, "{no}");
        }
        let gone = CommError::Broken { rank: Rank(0), phase: "memory box" };
        assert_eq!(Problem::from(gone).status, Status::Lost);
    }
}
