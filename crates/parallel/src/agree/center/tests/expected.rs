//! The same against numbers of a script that knows nothing of this program: `tools/agreements.py`.

use super::*;

/// A line of the script's.
pub(super) struct Expected {
    pub method: String,
    pub numbers: Vec<f64>,
    pub order: Vec<usize>,
    pub weights: Vec<Vec<f64>>,
}

pub(super) fn expected() -> Vec<Expected> {
    fn list<T: std::str::FromStr>(word: &str) -> Vec<T> {
        word.split(',').map(|number| number.parse().ok().expect("a number")).collect()
    }
    let of = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let weights = words[3..].iter().map(|word| list(word)).collect();
        Expected { method: words[0].to_owned(), numbers: list(words[1]), order: list(words[2]), weights }
    };
    include_str!("expected.txt").lines().map(of).collect()
}

#[test]
fn workers_come_to_where_a_script_says() {
    let lines = expected();
    assert_eq!(lines.len(), 13, "every case of the script");
    let of_rules = lines.into_iter().filter(|line| line.method != "seasgd");
    for Expected { method, numbers, order, weights } in of_rules {
        let count = |index: usize| Some(numbers[index] as u64);
        let rounds = RoundOptions::default();
        let (recipe, rounds, staleness): (&'static dyn Recipe, _, _) = match method.as_str() {
            "easgd" => {
                let rounds = RoundOptions { period: count(0), elastic_rate: Some(numbers[1]), ..rounds };
                (&elastic::RECIPE, rounds, None)
            }
            "easgd-sync" => {
                let rounds = RoundOptions { period: Some(1), elastic_rate: Some(numbers[0]), ..rounds };
                (&elastic::RECIPE, rounds, Some(0))
            }
            "downpour" => {
                let [fetch_every, push_every] = [count(0), count(1)];
                let push_rate = Some(numbers[2]);
                (&downpour::RECIPE, RoundOptions { fetch_every, push_every, push_rate, ..rounds }, None)
            }
            _ => (&dogwild::RECIPE, RoundOptions { period: count(0), push_rate: Some(numbers[1]), ..rounds }, None),
        };
        let elements = weights[0].len();
        world(recipe, options(rounds, staleness), (weights.len(), 1, elements), |mut workers| {
            for steps in order.chunks(if staleness == Some(0) { workers.len() } else { 1 }) {
                steps.iter().for_each(|&worker| workers[worker].begin());
                steps.iter().for_each(|&worker| workers[worker].end());
                if method == "downpour" {
                    settle_pushes(&mut workers);
                }
            }
            workers.iter().zip(&weights).for_each(|(worker, weights)| worker.assert_at(weights));
        });
    }
}
