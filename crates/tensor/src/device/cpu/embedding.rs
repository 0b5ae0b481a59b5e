//! Rows of a table chosen by ids, and the gradient that adds into those rows.
//!
//! The gradient is cut by ranges of the vocabulary: each task walks all ids and adds only its own rows, in the order of
//! the ids. So no two tasks touch one row, and the result does not depend on the cut.

use super::context::Context;
use crate::dtype::Float;

/// Vocabulary ranges of the gradient: each costs one walk over the ids.
const RANGES: usize = 16;

/// `y[i] = table[ids[i]]` for a table `[vocabulary, width]`.
///
/// # Panics
/// When an id is outside the table.
pub fn forward<E: Float>(context: &Context<'_>, ids: &[i32], (table, width): (&[f32], usize), y: &mut [E]) {
    assert_eq!(y.len(), ids.len() * width, "one row per id");
    check(ids, table.len() / width);
    let rows = (1usize << 14).div_ceil(width);
    context.pool.chunks(y, rows * width, |task, y| {
        for (y, &id) in y.chunks_exact_mut(width).zip(&ids[task * rows..]) {
            let row = &table[id as usize * width..][..width];
            y.iter_mut().zip(row).for_each(|(y, &x)| *y = E::from_f32(x));
        }
    });
}

/// `dtable[ids[i]] += dy[i]`, from zero.
///
/// # Panics
/// When an id is outside the table.
pub fn gradient<E: Float>(context: &Context<'_>, ids: &[i32], (dy, width): (&[E], usize), dtable: &mut [f32]) {
    assert_eq!(dy.len(), ids.len() * width, "one row per id");
    let vocabulary = dtable.len() / width;
    check(ids, vocabulary);
    let range = vocabulary.div_ceil(RANGES).max(1);
    context.pool.chunks(dtable, range * width, |task, dtable| {
        dtable.fill(0.0);
        let first = task * range;
        let mine = first..first + dtable.len() / width;
        for (dy, &id) in dy.chunks_exact(width).zip(ids) {
            if mine.contains(&(id as usize)) {
                let row = &mut dtable[(id as usize - first) * width..][..width];
                row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy.to_f32());
            }
        }
    });
}

fn check(ids: &[i32], vocabulary: usize) {
    let wrong = ids.iter().find(|&&id| id < 0 || id as usize >= vocabulary);
    assert!(wrong.is_none(), "id {} is outside a table of {vocabulary} rows", wrong.unwrap_or(&0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{assert_close, numbers, once, same_bits};

    #[test]
    fn rows_are_found_and_gradients_add_up() {
        for (count, vocabulary, width) in [(1, 1, 1), (500, 17, 3), (3000, 100, 64), (10, 1000, 17)] {
            let table = numbers(1, vocabulary * width);
            let ids: Vec<i32> = (0..count).map(|index| (index * index * 31 % vocabulary) as i32).collect();
            let y = same_bits(|context| {
                let mut y = vec![f32::NAN; count * width];
                forward(context, &ids, (&table, width), &mut y);
                y
            });
            let expected: Vec<f32> =
                ids.iter().flat_map(|&id| &table[id as usize * width..][..width]).copied().collect();
            assert_eq!(y, expected);
            let dtable = same_bits(|context| {
                let mut dtable = vec![f32::NAN; table.len()];
                gradient(context, &ids, (&y, width), &mut dtable);
                dtable
            });
            let mut expected = vec![0.0; table.len()];
            for (index, &y) in y.iter().enumerate() {
                expected[ids[index / width] as usize * width + index % width] += f64::from(y);
            }
            assert_close(&dtable, &expected, 1e-5);
        }
    }

    #[test]
    #[should_panic(expected = "id 5 is outside a table of 5 rows")]
    fn an_id_outside_the_table_is_named() {
        once(|context| forward(context, &[5], (&[0.0; 10], 2), &mut [0.0f32; 2]));
    }
}
