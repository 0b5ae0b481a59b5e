//! Slurm's short form of node names, `node[01-03,07],gpu2`, written out: node01 node02 node03 node07 gpu2.
//!
//! A name may have several brackets (`rack[1-2]n[1-4]`); the rightmost varies fastest. Leading zeros set the width.

use crate::ClusterError;
use crate::error::refused;

/// More nodes than any machine has; a list that would be longer is an error, not a lot of memory.
const NODES_MAX: usize = 1 << 16;

/// Writes a node list out.
///
/// # Errors
/// When it is not one, or would name more nodes than exist anywhere.
pub fn expand(list: &str) -> Result<Vec<String>, ClusterError> {
    let mut nodes = Vec::new();
    for part in split(list).ok_or_else(|| wrong(list))? {
        nodes.extend(expand_name(part, NODES_MAX - nodes.len()).ok_or_else(|| wrong(list))?);
    }
    if nodes.is_empty() { refused(wrong(list).to_string()) } else { Ok(nodes) }
}

fn wrong(list: &str) -> ClusterError {
    ClusterError::Refused(format!(
        "`{list}` is not a list of nodes such as node[01-03,07],gpu2; set MASTER_ADDR to the host of rank 0"
    ))
}

/// The parts between commas that are not in brackets.
fn split(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (index, sign) in list.char_indices() {
        match sign {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return None,
            ',' if !inside => {
                parts.push(&list[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    (!inside).then_some(parts)
}

/// The names that one part stands for: its text with each bracket replaced by each of its numbers.
fn expand_name(part: &str, room: usize) -> Option<Vec<String>> {
    let mut names = vec![String::new()];
    let mut rest = part;
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, behind) = after.split_once(']')?;
        let numbers = numbers(ranges, room / names.len().max(1))?;
        names =
            names.iter().flat_map(|name| numbers.iter().map(move |number| format!("{name}{before}{number}"))).collect();
        rest = behind;
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    let good = names.len() <= room && names.iter().all(|name| super::Address::is_host(name));
    good.then_some(names)
}

/// `01-03,07` as 01, 02, 03, 07.
fn numbers(ranges: &str, room: usize) -> Option<Vec<String>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let digits = |text: &str| !text.is_empty() && text.len() <= 9 && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(first) || !digits(last) {
            return None;
        }
        let (from, to): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if from > to || to - from >= room - numbers.len().min(room) {
            return None;
        }
        let width = first.len();
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn brackets_are_written_out() {
        let nodes = |list: &str| expand(list).unwrap().join(" ");
        assert_eq!(nodes("node[01-03,07],gpu2"), "node01 node02 node03 node07 gpu2");
        assert_eq!(nodes("a"), "a");
        assert_eq!(nodes("a,b"), "a b");
        assert_eq!(nodes("n[9-11]"), "n9 n10 n11");
        assert_eq!(nodes("n[099-101]"), "n099 n100 n101");
        assert_eq!(nodes("rack[1-2]n[1-2].local"), "rack1n1.local rack1n2.local rack2n1.local rack2n2.local");
        assert_eq!(expand("n[0-9999],m[0-9999]").unwrap().len(), 20_000);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for list in
            ["", ",", "a,", "n[", "n]", "n[1", "n[1-]", "n[-1]", "n[2-1]", "n[a-b]", "n[[1]]", "n[]", "a b", "-x"]
        {
            assert!(expand(list).is_err(), "{list}");
        }
    }

    #[test]
    fn a_list_that_would_fill_the_memory_is_refused() {
        assert!(expand("n[0-999999999]").is_err());
        assert!(expand("n[0-999][0-999][0-999]").is_err());
        assert!(expand(&"n[0-9999],".repeat(100)).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(list in "[a-c0-9,\\[\\]\\-]{0,40}") {
            if let Ok(nodes) = expand(&list) {
                prop_assert!(!nodes.is_empty() && nodes.len() <= NODES_MAX);
            }
        }

        #[test]
        fn a_short_form_names_what_was_shortened(from in 0usize..500, count in 1usize..50, width in 1usize..5) {
            let to = from + count - 1;
            let written: Vec<String> = (from..=to).map(|number| format!("n{number:0width$}")).collect();
            prop_assert_eq!(expand(&format!("n[{from:0width$}-{to:0width$}]")).unwrap(), written);
        }
    }
}
