//! Local SGD: every worker steps by itself, and at the end of a round all go on from the mean of their weights.
//!
//! A round of H steps sends the weights once where an all-reduce sends gradients H times: 1/H of the bytes, and of
//! the waiting. With `--post-local N` the first N steps are each a round of their own. With `--node-period` the
//! workers of a machine average among themselves inside of a round of all. What a round has changed on average, D,
//! may be stepped with instead of taken as it is (DiLoCo): v = μv + D, and the weights all began the round with
//! move by η(D + μv), Nesterov's form; with η = 1 and μ = 0 that is the mean. With `--fragments F` a round exchanges F
//! parts of the weights one after the other, each at a step of its own: no exchange is longer than S/F bytes, and each
//! is hidden behind the steps until the next (`stream.rs`).
//!
//! Every worker steps with the mean gradient of its own share of a batch. Its optimizer's state is its own until
//! the weights are looked at (an evaluation, a checkpoint, the end): a round ends there too, and all go on with the
//! mean of both, so that a resumed run is the run that was saved.

mod stream;

use paceline_comm::collective::transfers;
use paceline_comm::transfer::chunk;
use paceline_comm::{Collective, CommError, Communicator, Rank, Transfer};

use stream::Stream;

use super::{
    Agreement, Demands, Join, Options, Protocol, Reach, Recipe, Rounds, Shape, StepReport,
};

/// Steps of a round, if nobody says otherwise.
const PERIOD: u64 = 8;

/// What the command line offers.
#[derive(Debug)]
pub struct LocalSgd;

/// The same.
pub const RECIPE: LocalSgd = LocalSgd;

/// How the outcome of a round becomes weights.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Outer {
    rate: f32,
    momentum: f32,
}

impl Outer {
    fn new(options: &Options) -> Self {
        let rounds = &options.rounds;
        let [rate, momentum] = [rounds.outer_rate.unwrap_or(1.0), rounds.outer_momentum.unwrap_or(0.0)];
        Self { rate: rate as f32, momentum: momentum as f32 }
    }

    /// Whether weights are the mean, so that there is nothing to remember.
    fn is_mean(self) -> bool {
        self == Self { rate: 1.0, momentum: 0.0 }
    }

    /// Makes of the mean of all workers' weights those of the next round.
    fn step(self, anchor: &mut [f32], velocity: &mut [f32], mean: &mut [f32]) {
        let Self { rate, momentum } = self;
        for ((anchor, velocity), mean) in anchor.iter_mut().zip(velocity).zip(mean) {
            let change = *anchor - *mean;
            *velocity = momentum * *velocity + change;
            *anchor -= rate * (change + momentum * *velocity);
            *mean = *anchor;
        }
    }
}

fn period(options: &Options) -> u64 {
    options.rounds.period.unwrap_or(PERIOD)
}

fn rounds(options: &Options) -> Rounds {
    let rounds = &options.rounds;
    Rounds {
        every: Some(period(options)),
        within_node: rounds.node_period,
        warm_up: rounds.warm_up.unwrap_or(0),
        fragments: rounds.fragments.unwrap_or(1),
    }
}

impl Recipe for LocalSgd {
    fn name(&self) -> &'static str {
        "local"
    }

    fn about(&self) -> &'static str {
        "steps of each worker's own, and the mean of all weights every --period"
    }

    fn is_synchronous(&self, _: &Options) -> bool {
        false
    }

    fn copies(&self, options: &Options) -> usize {
        // What all began the round with, and the velocity.
        if Outer::new(options).is_mean() { 0 } else { 2 }
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        let (every, within_node) = (period(&demands.options), demands.options.rounds.node_period);
        let Outer { rate, momentum } = Outer::new(&demands.options);
        let sentence = if let Some(sentence) = demands.foreign(self.name()) {
            sentence
        } else if demands.staleness {
            "--staleness is for agreements with servers; type --agree parameter-server, or leave it out".into()
        } else if demands.sync_batch_norm {
            "--sync-batch-norm needs workers that are at the same step, and those of --agree local step by themselves; \
             type --agree all-reduce, or leave it out"
                .into()
        } else if demands.options.shard {
            "--shard optimizer needs sums of gradients, and workers of --agree local step with their own; type --agree \
             all-reduce, or --shard none"
                .into()
        } else if demands.options.rounds.herds.is_some() {
            "--herds is for threads that share weights; type --agree hogwild, or leave it out".into()
        } else if !demands.options.squeeze.codec().is_identity() {
            format!(
                "--squeeze {} is for gradients, and --agree local sends weights, {every} steps apart; type a longer \
                 --period to send less, or --squeeze none",
                demands.options.squeeze.name()
            )
        } else if demands.saves_by_clock {
            "--checkpoint-minutes needs workers that meet at every step, and those of --agree local do where a round \
             ends; type --checkpoint-every with a number of steps"
                .into()
        } else if let Some(node) = within_node.filter(|node| !every.is_multiple_of(*node) || *node == every) {
            format!(
                "--node-period {node} has to be less than --period {every} and to divide it, so that a round of all ends \
                 one of each machine; type for example --node-period {node} --period {}",
                node.saturating_mul(4)
            )
        } else if let Some(fragments) = demands.options.rounds.fragments.filter(|&fragments| fragments > every) {
            format!(
                "--fragments {fragments} are more than the {every} steps of a round, and each has a step of its own; type \
                 --fragments {every} or less, or a longer --period"
            )
        } else if demands.options.rounds.fragments.is_some_and(|fragments| fragments > 1) && within_node.is_some() {
            "--node-period exchanges all weights, and --fragments a part; leave one of them out".into()
        } else if !(rate.is_finite() && rate > 0.0) {
            "--outer-rate must be above zero, and a number that 32 bits hold; type for example --outer-rate 0.7".into()
        } else if !(0.0..1.0).contains(&momentum) {
            "--outer-momentum must be from 0 to below 1; type for example --outer-momentum 0.9".into()
        } else {
            return None;
        };
        Some(sentence)
    }

    fn protocol(&self, _: &Shape, options: &Options) -> Protocol {
        let buffers = usize::from(!Outer::new(options).is_mean());
        Protocol::local(self.name(), rounds(options), buffers)
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let Join { communicator, urgent, shape, options, deadline, .. } = join;
        let stream = urgent.map(|communicator| Stream::start(communicator, deadline)).transpose()?;
        let nodes = communicator.choice().links().nodes.groups();
        let own = communicator.rank().index();
        let neighbours = nodes.into_iter().find(|node| node.contains(&own)).unwrap_or_else(|| vec![own]);
        Ok(Box::new(Worker {
            protocol: self.protocol(shape, &options),
            neighbours: neighbours.into_iter().map(Rank::at).collect(),
            communicator,
            outer: Outer::new(&options),
            anchor: Vec::new(),
            report: StepReport::default(),
            exchanges: 0,
            stream,
            fragments: options.rounds.fragments.unwrap_or(1) as usize,
        }))
    }
}

/// A worker's end. Nobody waits beside it, so its thread carries the messages itself.
#[derive(Debug)]
struct Worker {
    communicator: Communicator,
    protocol: Protocol,
    /// The ranks of this machine.
    neighbours: Vec<Rank>,
    outer: Outer,
    /// The weights that all began the round with, where they are needed.
    anchor: Vec<f32>,
    report: StepReport,
    /// Counts averages among neighbours.
    exchanges: u64,
    /// Carries fragments beside steps, where the run has a communicator for it.
    stream: Option<Stream>,
    /// Parts of the weights that are exchanged one by one.
    fragments: usize,
}

impl Worker {
    /// This rank's part of an all-reduce among the ranks of its machine, by whatever is cheapest there.
    fn among_neighbours(&self, elements: usize) -> Vec<Transfer> {
        let choice = self.communicator.choice().restricted_to(&self.neighbours);
        let own = self.neighbours.iter().position(|&rank| rank == self.communicator.rank()).unwrap_or(0);
        let algorithm = choice.algorithm(Collective::AllReduce, elements * size_of::<f32>());
        let mut list = transfers(Collective::AllReduce, algorithm, Rank::at(own), &choice.links().nodes, elements);
        list.iter_mut().for_each(|transfer| transfer.peer = self.neighbours[transfer.peer.index()]);
        list
    }
}

impl Agreement for Worker {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    fn workers(&self) -> usize {
        self.communicator.world()
    }

    fn shares_steps(&self) -> bool {
        false
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.broadcast(Rank(0), numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.all_reduce(numbers)
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.report = report;
        Ok(())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        Ok(self.report)
    }

    fn opened(&mut self, weights: &[f32]) {
        if !self.outer.is_mean() {
            self.anchor = weights.to_vec();
        }
    }

    fn exchange_weights(
        &mut self,
        reach: Reach,
        weights: &mut [f32],
        kept: &mut [Vec<f32>],
    ) -> Result<(), CommError> {
        let all = 0..weights.len();
        let part = match reach {
            Reach::Node => {
                self.exchanges += 1;
                let list = self.among_neighbours(weights.len());
                self.communicator.exchange(&list, self.exchanges, weights)?;
                let share = 1.0 / self.neighbours.len() as f32;
                weights.iter_mut().for_each(|weight| *weight *= share);
                return Ok(());
            }
            Reach::Fragment { index } => chunk(all.end, self.fragments, index as usize),
            Reach::All => all,
        };
        let Self { communicator, outer, anchor, stream, .. } = self;
        let share = 1.0 / communicator.world() as f32;
        let mut outcome = |part: std::ops::Range<usize>, sums: &mut [f32]| {
            sums.iter_mut().for_each(|sum| *sum *= share);
            if let [velocity] = kept {
                outer.step(&mut anchor[part.clone()], &mut velocity[part], sums);
            }
        };
        if let Some(stream) = stream {
            stream.end(weights, &mut outcome)?;
            if let Reach::Fragment { .. } = reach {
                stream.begin(part, weights);
                return Ok(());
            }
        }
        communicator.all_reduce(&mut weights[part.clone()])?;
        outcome(part.clone(), &mut weights[part]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker on f(x) = c(x − m)²/2, whose gradient is c(x − m).
    #[derive(Clone, Copy)]
    struct Quadratic {
        curvature: f64,
        minimum: f64,
    }

    const RATE: f64 = 0.1;
    const WORKERS: [Quadratic; 2] =
        [Quadratic { curvature: 1.0, minimum: 2.0 }, Quadratic { curvature: 3.0, minimum: -1.0 }];

    /// Where H steps of gradient descent lead in closed form: x − m shrinks by (1 − ηc) a step.
    fn after(worker: Quadratic, x: f64, steps: u64) -> f64 {
        worker.minimum + (x - worker.minimum) * (1.0 - RATE * worker.curvature).powi(steps as i32)
    }

    /// The weights after so many rounds by the rule, in closed form.
    fn expected(rounds: u64, every: u64, outer: (f64, f64)) -> f64 {
        let (mut x, mut velocity) = (0.5, 0.0);
        for _ in 0..rounds {
            let mean = WORKERS.iter().map(|&worker| after(worker, x, every)).sum::<f64>() / 2.0;
            let change = x - mean;
            velocity = outer.1 * velocity + change;
            x -= outer.0 * (change + outer.1 * velocity);
        }
        x
    }

    /// The same by the code: steps one by one, and the outcome of a round by [`Outer`].
    fn found(rounds: u64, every: u64, (rate, momentum): (f64, f64)) -> f64 {
        let outer = Outer { rate: rate as f32, momentum: momentum as f32 };
        let (mut anchor, mut velocity) = ([0.5f32], [0.0f32]);
        for _ in 0..rounds {
            let walk = |worker: &Quadratic| {
                (0..every).fold(anchor[0], |x, _| {
                    x - RATE as f32 * worker.curvature as f32 * (x - worker.minimum as f32)
                })
            };
            let mut mean = [WORKERS.iter().map(walk).sum::<f32>() / 2.0];
            match outer.is_mean() {
                true => anchor = mean,
                false => outer.step(&mut anchor, &mut velocity, &mut mean),
            }
            assert_eq!(anchor, mean);
        }
        f64::from(anchor[0])
    }

    #[test]
    fn rounds_on_a_quadratic_go_where_the_rule_says() {
        for outer in [(1.0, 0.0), (0.7, 0.9), (0.5, 0.0), (1.0, 0.5)] {
            for (rounds, every) in [(1, 1), (1, 8), (5, 4), (12, 16)] {
                let (found, expected) = (found(rounds, every, outer), expected(rounds, every, outer));
                assert!((found - expected).abs() < 1e-5, "{rounds} of {every}, {outer:?}: {found} for {expected}");
            }
        }
    }

    #[test]
    fn an_outer_step_of_rate_one_without_momentum_is_the_mean() {
        let (mut anchor, mut velocity, mut mean) = ([1.0, -2.0], [0.0; 2], [0.25, 4.0]);
        Outer { rate: 1.0, momentum: 0.0 }.step(&mut anchor, &mut velocity, &mut mean);
        assert_eq!(mean, [0.25, 4.0]);
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_to_type() {
        let said = |rounds: super::super::RoundOptions| {
            let options = Options { rounds, ..Options::default() };
            RECIPE.refuses(&Demands { options, ..Demands::default() }).unwrap_or_default()
        };
        let rounds = super::super::RoundOptions::default();
        assert_eq!(said(rounds), "");
        let node = said(super::super::RoundOptions { period: Some(10), node_period: Some(4), ..rounds });
        assert!(node.ends_with("type for example --node-period 4 --period 16"), "{node}");
        let rate = said(super::super::RoundOptions { outer_rate: Some(f64::NAN), ..rounds });
        assert!(rate.contains("--outer-rate 0.7"), "{rate}");
        let fragments = said(super::super::RoundOptions { fragments: Some(9), ..rounds });
        assert!(fragments.contains("--fragments 8 or less"), "{fragments}");
        let momentum = said(super::super::RoundOptions { outer_momentum: Some(1.0), ..rounds });
        assert!(momentum.contains("--outer-momentum 0.9"), "{momentum}");
    }
}
