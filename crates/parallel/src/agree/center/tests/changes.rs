//! Downpour and Dogwild: what workers push is what they have changed.

use super::*;

/// Downpour by the rule: a fetch is begun before a step and there behind it.
struct Rule {
    w: Vec<Vec<f64>>,
    /// What each has changed and not pushed.
    changed: Vec<Vec<f64>>,
    server: Vec<f64>,
    squares: Vec<f64>,
    adagrad: Option<f64>,
    steps: Vec<u64>,
    every: (u64, u64),
    /// How much of a change is added.
    rate: f64,
}

impl Rule {
    fn new(workers: usize, elements: usize, every: (u64, u64), adagrad: Option<f64>) -> Self {
        let (server, zeros) = (start(elements), vec![0.0; elements]);
        let (w, changed) = (vec![server.clone(); workers], vec![zeros.clone(); workers]);
        let rate = 1.0 / workers as f64;
        Self { w, changed, server, squares: zeros, adagrad, steps: vec![0; workers], every, rate }
    }

    fn push(&mut self, worker: usize) {
        for (index, change) in self.changed[worker].iter_mut().map(std::mem::take).enumerate() {
            self.squares[index] += change * change;
            self.server[index] += match self.adagrad {
                Some(rate) if change != 0.0 => rate * change / self.squares[index].sqrt(),
                Some(_) => 0.0,
                None => self.rate * change,
            };
        }
    }

    fn step(&mut self, worker: usize) {
        let step = self.steps[worker];
        self.steps[worker] += 1;
        let fetched = step.is_multiple_of(self.every.0).then(|| self.server.clone());
        for index in 0..self.server.len() {
            let change = -RATE * gradient(worker, self.w[worker][index]);
            self.changed[worker][index] += change;
            self.w[worker][index] += change;
            if let Some(fetched) = &fetched {
                self.w[worker][index] = fetched[index] + self.changed[worker][index];
            }
        }
        if step.is_multiple_of(self.every.1) {
            self.push(worker);
        }
    }

    fn meet(&mut self) {
        (0..self.w.len()).for_each(|worker| self.push(worker));
        self.w.iter_mut().for_each(|w| w.copy_from_slice(&self.server));
    }
}

#[test]
fn downpour_in_any_order_is_where_the_rule_says() {
    let order = [0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1];
    let cases = [
        (1, (1, 1), None, None),
        (2, (2, 3), None, Some(1.0)),
        (1, (3, 2), Some(0.05), None),
        (2, (4, 1), None, Some(0.8)),
    ];
    for (servers, every, adagrad, rate) in cases {
        let rounds = RoundOptions {
            fetch_every: Some(every.0),
            push_every: Some(every.1),
            push_rate: rate,
            server_adagrad: adagrad,
            ..RoundOptions::default()
        };
        world(&downpour::RECIPE, options(rounds, None), (2, servers, 5), |mut workers| {
            let mut rule = Rule { rate: rate.unwrap_or(0.5), ..Rule::new(2, 5, every, adagrad) };
            for worker in order {
                workers[worker].step(1);
                settle_pushes(&mut workers);
                rule.step(worker);
                workers[worker].assert_at(&rule.w[worker]);
            }
            let kept = all_meet(&mut workers, usize::from(adagrad.is_some()));
            rule.meet();
            workers.iter().for_each(|worker| worker.assert_at(&rule.server));
            for (found, expected) in kept.iter().flatten().zip(&rule.squares) {
                assert!((f64::from(*found) - expected).abs() < 1e-4 * expected, "{found} for {expected}");
            }
        });
    }
}

/// Each update counts as one divided by one more than the updates of the other that came between what it was computed
/// from and itself.
#[test]
fn updates_count_less_the_more_they_have_missed() {
    let order = [0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1];
    let rounds = RoundOptions { staleness_aware: true, ..RoundOptions::default() };
    world(&downpour::RECIPE, options(rounds, None), (2, 1, 3), |mut workers| {
        let (mut w, mut server) = (vec![start(3); 2], start(3));
        // Updates of the other that a worker's last fetch had, and of each that were applied.
        let (mut known, mut applied) = ([0u64; 2], [0u64; 2]);
        for worker in order {
            workers[worker].step(1);
            settle_pushes(&mut workers);
            // What it pushes behind the step was computed before the fetch that the step hides came back.
            let missed = applied[1 - worker] - known[worker];
            let fetched = server.clone();
            for index in 0..3 {
                let change = -RATE * gradient(worker, w[worker][index]);
                w[worker][index] = fetched[index] + change;
                server[index] += change / (1 + missed) as f64;
            }
            known[worker] = applied[1 - worker];
            applied[worker] += 1;
            workers[worker].assert_at(&w[worker]);
        }
    });
}

#[test]
fn dogwild_in_any_order_is_where_the_rule_says() {
    let order = [0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1];
    for (servers, period, rate) in [(1, 1, Some(1.0)), (1, 3, None), (2, 2, Some(1.0)), (3, 4, None)] {
        let rounds = RoundOptions { period: Some(period), push_rate: rate, ..RoundOptions::default() };
        let elements = 7;
        // Which piece an element is of: every server's part is cut into as many as equal pieces.
        let mut pieces = Vec::new();
        for server in 0..servers {
            let length = elements / servers + usize::from(server < elements % servers);
            let of = |piece: usize| length / period as usize + usize::from(piece < length % period as usize);
            pieces.extend((0..period as usize).flat_map(|piece| vec![piece; of(piece)]));
        }
        world(&dogwild::RECIPE, options(rounds, None), (2, servers, elements), |mut workers| {
            let (mut w, mut known) = (vec![start(elements); 2], vec![start(elements); 2]);
            let (mut master, mut steps) = (start(elements), [0u64; 2]);
            let rate = rate.unwrap_or(0.5);
            for worker in order {
                workers[worker].step(1);
                let piece = steps[worker].checked_sub(1).map(|step| (step % period) as usize);
                steps[worker] += 1;
                for index in 0..elements {
                    let (w, known) = (&mut w[worker][index], &mut known[worker][index]);
                    let before = *w;
                    *w -= RATE * gradient(worker, before);
                    if piece == Some(pieces[index]) {
                        // W − L is sent, and L is W as it was sent; then comes M.
                        master[index] += rate * (before - *known);
                        *w += master[index] - before;
                        *known = master[index];
                    }
                }
                workers[worker].assert_at(&w[worker]);
            }
            all_meet(&mut workers, 0);
            for index in 0..elements {
                master[index] += (0..2).map(|worker| rate * (w[worker][index] - known[worker][index])).sum::<f64>();
            }
            workers.iter().for_each(|worker| worker.assert_at(&master));
        });
    }
}

#[test]
fn one_worker_that_pushes_changes_makes_the_steps_of_sgd() {
    for every in [(1, 1), (3, 5), (5, 2)] {
        let rounds = RoundOptions { fetch_every: Some(every.0), push_every: Some(every.1), ..RoundOptions::default() };
        world(&downpour::RECIPE, options(rounds, None), (1, 1, 3), |mut workers| {
            workers[0].step(20);
            // In closed form: x − m shrinks by (1 − ηc) a step.
            let (curvature, minimum) = FUNCTIONS[0];
            let after = |x: f64| minimum + (x - minimum) * (1.0 - RATE * curvature).powi(20);
            let expected: Vec<f64> = start(3).into_iter().map(after).collect();
            workers[0].assert_at(&expected);
            workers[0].meet(&mut []);
            workers[0].assert_at(&expected);
        });
    }
    // And so does one of dogwild, whatever its pieces.
    let rounds = RoundOptions { period: Some(3), ..RoundOptions::default() };
    world(&dogwild::RECIPE, options(rounds, None), (1, 1, 3), |mut workers| {
        workers[0].step(20);
        let after = |x: f64| FUNCTIONS[0].1 + (x - FUNCTIONS[0].1) * (1.0 - RATE).powi(20);
        let expected: Vec<f64> = start(3).into_iter().map(after).collect();
        workers[0].assert_at(&expected);
        workers[0].meet(&mut []);
        workers[0].assert_at(&expected);
    });
}

#[test]
fn the_others_begin_where_one_that_stepped_alone_has_come_to() {
    // With buffers of the servers' own, which nobody is given at that meeting.
    let rounds = RoundOptions { warm_start: Some(5), server_adagrad: Some(0.05), ..RoundOptions::default() };
    world(&downpour::RECIPE, options(rounds, None), (2, 1, 2), |workers| {
        let [mut first, mut second] = <[Driven; 2]>::try_from(workers).ok().unwrap();
        first.step(4);
        let mut rule = Rule::new(2, 2, (1, 1), Some(0.05));
        (0..5).for_each(|_| rule.step(0));
        std::thread::scope(|scope| {
            let begins = scope.spawn(|| {
                second.begin();
                second
            });
            first.step(1);
            first.assert_at(&rule.w[0]);
            // Its sixth step begins with the meeting.
            first.begin();
            let second = begins.join().unwrap();
            second.assert_at(&rule.server);
            first.end();
            drop(second);
        });
    });
}

#[test]
fn the_others_begin_too_where_one_that_steps_alone_runs_out_of_steps() {
    let rounds = RoundOptions { warm_start: Some(50), ..RoundOptions::default() };
    world(&downpour::RECIPE, options(rounds, None), (2, 1, 2), |workers| {
        let [mut first, mut second] = <[Driven; 2]>::try_from(workers).ok().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                second.step(1);
                second.agreement.sum(&mut [1.0]).unwrap();
                second.meet(&mut []);
                second.weights
            });
            first.step(3);
            let mut sum = [1.0];
            first.agreement.sum(&mut sum).unwrap();
            assert_eq!(sum, [2.0]);
            first.meet(&mut []);
            assert_eq!(other.join().unwrap(), first.weights);
        });
    });
}
