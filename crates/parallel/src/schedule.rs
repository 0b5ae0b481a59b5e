//! Which gradients travel when: a list of messages that every rank makes for itself and that comes out the
//! same everywhere.
//!
//! A link carries one message at a time. Sending in the order in which gradients become final keeps it busy
//! from the earliest moment on, but the next forward pass begins with the layer whose gradient came last; so
//! of all that is ready, what is needed first goes first (TicTac). Large buckets are cut into pieces, between
//! which something more urgent can pass. The times of a step are measured by one rank and given to all, so
//! that a list made from them is the same on all.

use std::ops::Range;

/// Elements of a piece: 4 MiB, large enough to reach a link's bandwidth. At 1 Gbit/s it occupies the link for
/// 34 ms.
pub const PIECE_ELEMENTS: usize = 1 << 20;

/// What is known of a bucket before it travels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// When it becomes final, in seconds from the start of a step.
    pub ready_s: f64,
    /// How early the next forward pass needs it: smaller is earlier.
    pub need: usize,
    /// Its length.
    pub elements: usize,
}

/// How long a message takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpeed {
    /// Of any message.
    pub latency_s: f64,
    /// Of each of its elements, besides.
    pub element_s: f64,
}

/// A part of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Which bucket.
    pub bucket: usize,
    /// Which of its elements.
    pub range: Range<usize>,
}

/// The pieces of a bucket of so many elements, in order; an empty bucket has an empty one.
pub fn pieces(elements: usize) -> impl Iterator<Item = Range<usize>> {
    let piece = move |index: usize| index * PIECE_ELEMENTS..((index + 1) * PIECE_ELEMENTS).min(elements);
    (0..elements.div_ceil(PIECE_ELEMENTS).max(1)).map(piece)
}

/// The messages of a step in the order in which they are sent.
///
/// # Panics
/// When a time is not a number.
pub fn schedule(buckets: &[Expected], speed: LinkSpeed) -> Vec<Message> {
    let mut by_time: Vec<usize> = (0..buckets.len()).collect();
    by_time.sort_by(|&a, &b| buckets[a].ready_s.total_cmp(&buckets[b].ready_s).then(a.cmp(&b)));
    let mut coming = by_time.into_iter().peekable();
    // What is ready: how urgent, which, and how much of it was sent.
    let mut ready: Vec<(usize, usize, usize)> = Vec::new();
    let (mut messages, mut now) = (Vec::new(), 0.0f64);
    loop {
        while let Some(bucket) = coming.next_if(|&bucket| ready.is_empty() || buckets[bucket].ready_s <= now) {
            assert!(!buckets[bucket].ready_s.is_nan(), "a time is a number");
            now = now.max(buckets[bucket].ready_s);
            ready.push((buckets[bucket].need, bucket, 0));
        }
        let Some(index) = (0..ready.len()).min_by_key(|&index| ready[index]) else { return messages };
        let (_, bucket, done) = ready[index];
        let end = (done + PIECE_ELEMENTS).min(buckets[bucket].elements);
        now += speed.latency_s + (end - done) as f64 * speed.element_s;
        messages.push(Message { bucket, range: done..end });
        if end == buckets[bucket].elements {
            ready.swap_remove(index);
        } else {
            ready[index].2 = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPEED: LinkSpeed = LinkSpeed { latency_s: 1e-4, element_s: 3.2e-8 };

    fn bucket(ready_s: f64, need: usize, elements: usize) -> Expected {
        Expected { ready_s, need, elements }
    }

    #[test]
    fn what_is_needed_first_overtakes_what_is_large() {
        // VGG: the classifier's gradient is final first and needed last.
        let messages = schedule(&[bucket(0.0, 2, 100 << 20), bucket(0.1, 1, 1 << 19), bucket(0.2, 0, 1000)], SPEED);
        let order: Vec<usize> = messages.iter().map(|message| message.bucket).collect();
        let first = order.iter().position(|&bucket| bucket == 1).unwrap();
        let second = order.iter().position(|&bucket| bucket == 2).unwrap();
        assert!(first < 5 && second < 10 && order.last() == Some(&0), "{order:?}");
    }

    #[test]
    fn on_a_fast_link_the_order_is_that_of_the_backward_pass() {
        let speed = LinkSpeed { latency_s: 1e-6, element_s: 1e-10 };
        let messages = schedule(&[bucket(0.1, 2, 1000), bucket(0.2, 1, 1000), bucket(0.3, 0, 1000)], speed);
        assert_eq!(messages.iter().map(|message| message.bucket).collect::<Vec<_>>(), [0, 1, 2]);
    }

    proptest! {
        #[test]
        fn every_element_travels_once(
            buckets in prop::collection::vec((0.0f64..1.0, 0usize..10, 0usize..3 * PIECE_ELEMENTS), 0..12),
        ) {
            let buckets: Vec<_> = buckets.into_iter().map(|(ready, need, elements)| bucket(ready, need, elements)).collect();
            let messages = schedule(&buckets, SPEED);
            for (index, bucket) in buckets.iter().enumerate() {
                let mut end = 0;
                for message in messages.iter().filter(|message| message.bucket == index) {
                    prop_assert_eq!(message.range.start, end);
                    prop_assert!(message.range.len() <= PIECE_ELEMENTS);
                    end = message.range.end;
                }
                prop_assert_eq!(end, bucket.elements);
                let sent = messages.iter().filter(|message| message.bucket == index).map(|message| message.range.clone());
                prop_assert!(sent.eq(pieces(bucket.elements)), "pieces do not depend on the order");
                prop_assert!(messages.iter().any(|message| message.bucket == index), "an empty bucket has a message too");
            }
        }
    }
}
