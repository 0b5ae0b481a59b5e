//! Which known names a mistyped one is near to. Used by the error of `zoo::find` and of `Models::find`.

/// At most three of `known` that can be reached from `name` by few edits, nearest first.
pub(super) fn names<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let plain: String = name.to_lowercase().chars().filter(char::is_ascii_alphanumeric).collect();
    let mut near: Vec<(usize, &'a str)> = known
        .map(|other| (edits(&plain, &other.replace('_', "")), other))
        // A third of the letters wrong is a slip; more is another word.
        .filter(|&(distance, other)| distance <= other.len().min(plain.len()) / 3)
        .collect();
    near.sort_by_key(|&(distance, other)| (distance, !other.starts_with(&plain), other));
    let best = near.first().map_or(0, |&(distance, _)| distance);
    near.into_iter().filter(|&(distance, _)| distance == best).map(|(_, other)| other).take(3).collect()
}

/// Insertions, removals and replacements between two words (Levenshtein, 1965).
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for j in 0..b.len() {
            let replaced = diagonal + usize::from(letter != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, expected) in [("", "abc", 3), ("kitten", "sitting", 3), ("same", "same", 0), ("ab", "ba", 2)] {
            assert_eq!(edits(a, b), expected, "{a} → {b}");
        }
    }

    #[test]
    fn signs_and_capitals_do_not_count() {
        let known = ["vgg16", "vgg16_bn", "inceptionv3"];
        assert_eq!(names("Inception-V3", known.into_iter()), ["inceptionv3"]);
        assert_eq!(names("VGG16-BN", known.into_iter()), ["vgg16_bn"]);
    }
}
