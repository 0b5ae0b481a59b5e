//! Whether a step fits the machine's memory.

use crate::error::TrainError;

/// A plan is known before it runs, so a step that cannot fit is refused instead of being killed half-way. A machine that
/// does not tell its memory is trusted.
pub(crate) fn check_memory(needed_bytes: u64, memory_bytes: u64) -> Result<(), TrainError> {
    if memory_bytes == 0 || needed_bytes <= memory_bytes {
        return Ok(());
    }
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    Err(TrainError::Refused(format!(
        "a step needs {:.1} GB of memory and this machine has {:.1} GB; \
         type a smaller --batch or --size, --memory low, or compute the batch in parts with --accumulate 4",
        gigabytes(needed_bytes),
        gigabytes(memory_bytes)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_larger_than_the_memory_is_refused() {
        assert!(check_memory(10, 10).is_ok() && check_memory(10, 0).is_ok());
        let error = check_memory(20_000_000_000, 16_000_000_000).unwrap_err();
        assert!(
            error.to_string().starts_with("a step needs 20.0 GB of memory and this machine has 16.0 GB"),
            "{error}"
        );
    }
}
