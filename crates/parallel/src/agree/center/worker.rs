//! A worker's end: begins exchanges before steps, and takes in behind them what has come back.

use paceline_comm::{CommError, Rank};
use paceline_system::memory;

use super::super::{Agreement, Join, Point, Protocol, Reach, Returned, StepReport, Votes};
use super::link::{Link, Order, What};
use super::message::{Command, Header, Layout};
use super::{Exchange, Habit, WorkerSide};

/// Memory of a message.
#[derive(Debug)]
enum Memory {
    Home(Vec<f32>),
    Away,
}

/// A worker's end.
#[derive(Debug)]
pub(super) struct Worker {
    link: Link,
    protocol: Protocol,
    layout: Layout,
    habit: Box<dyn Habit>,
    /// Of exchanges that are answered, and of pushes that are not.
    exchanged: Memory,
    pushed: Memory,
    /// The exchange that has begun and not ended.
    under_way: Option<Exchange>,
    /// What the first worker steps alone, and whether that is over, once it is known where the run begins.
    alone: u64,
    joined: Option<bool>,
    /// Steps of the run that were made.
    steps: u64,
    report: StepReport,
    /// This worker's wishes, and those of all that it has heard.
    own: Votes,
    heard: Votes,
}

impl Worker {
    pub fn start(join: Join<'_>, protocol: Protocol, side: WorkerSide) -> Result<Self, CommError> {
        let Join { communicator, roles, shape, deadline, lending, .. } = join;
        let WorkerSide { habit, pieces, alone, lent } = side;
        let layout = Layout { roles, elements: shape.parameters, pieces };
        let message =
            || Memory::Home(memory::zeros(layout.message(), "messages").unwrap_or_else(|refused| refused.unwind()));
        let (exchanged, pushed) = (message(), message());
        let link = Link::start(communicator, layout, lending.zip(lent), deadline)?;
        Ok(Self {
            link,
            protocol,
            layout,
            habit,
            exchanged,
            pushed,
            under_way: None,
            alone,
            joined: None,
            steps: 0,
            report: StepReport::default(),
            own: Votes::default(),
            heard: Votes::default(),
        })
    }

    /// The exchange that has begun and not ended.
    pub fn under_way(&self) -> Option<Exchange> {
        self.under_way
    }

    fn header(&self, command: Command) -> Header {
        Header { steps: self.steps, votes: self.own, ..Header::new(command) }
    }

    /// Takes back the oldest order, and its memory home. Numbers that nobody keeps memory for are given back.
    fn take_order(&mut self) -> Result<Option<Order>, CommError> {
        let order = self.link.take()?;
        self.heard = self.heard.merge(order.told.votes);
        Ok(match order.what {
            What::Say(Header { command: Command::Exchange { pulls, .. }, .. }) => {
                let memory = if pulls { &mut self.exchanged } else { &mut self.pushed };
                *memory = Memory::Home(order.numbers);
                None
            }
            _ => Some(order),
        })
    }

    /// The memory of exchanges, or of pushes, once it is home.
    fn take_memory(&mut self, pulls: bool) -> Result<Vec<f32>, CommError> {
        loop {
            let memory = if pulls { &mut self.exchanged } else { &mut self.pushed };
            if let Memory::Home(numbers) = std::mem::replace(memory, Memory::Away) {
                return Ok(numbers);
            }
            self.take_order()?;
        }
    }

    /// Has something carried for which this worker waits.
    fn ask(&mut self, order: Order) -> Result<Order, CommError> {
        self.link.give(order);
        loop {
            if let Some(order) = self.take_order()? {
                return Ok(order);
            }
        }
    }

    /// Begins an exchange of what the weights are now.
    fn begin(&mut self, exchange: Exchange, point: Point<'_>) -> Result<(), CommError> {
        let Exchange { pushes, pulls, piece } = exchange;
        let mut numbers = self.take_memory(pulls)?;
        if pushes {
            self.layout.piece(piece).for_each(|range| self.habit.fill(range, point, &mut numbers));
        }
        let header = Header { number: piece as u64, ..self.header(Command::Exchange { pushes, pulls }) };
        self.link.give(Order::new(What::Say(header), numbers));
        Ok(())
    }

    /// Ends the exchange that is under way, if there is one.
    fn end(&mut self, weights: &mut [f32]) -> Result<bool, CommError> {
        let Some(Exchange { piece, .. }) = self.under_way.take() else { return Ok(false) };
        let numbers = self.take_memory(true)?;
        self.layout.piece(piece).for_each(|range| self.habit.take_back(range, &numbers, weights));
        self.exchanged = Memory::Home(numbers);
        Ok(true)
    }

    /// Pushes what is left, and goes on from the centre, as all do.
    fn meet(&mut self, point: Point<'_>, kept: &mut [Vec<f32>]) -> Result<Vec<f32>, CommError> {
        let mut numbers = self.take_memory(true)?;
        self.habit.fill(0..self.layout.elements, point, &mut numbers);
        let kept_memory = kept.iter_mut().map(std::mem::take).collect();
        let header = Header { number: kept.len() as u64, ..self.header(Command::Meet) };
        let order = Order::new(What::Say(header), numbers);
        let order = self.ask(Order { kept: kept_memory, ..order })?;
        kept.iter_mut().zip(order.kept).for_each(|(kept, given)| *kept = given);
        Ok(order.numbers)
    }

    /// The same for weights in one place.
    fn meet_with(&mut self, weights: &mut [f32], kept: &mut [Vec<f32>]) -> Result<(), CommError> {
        self.end(weights)?;
        let numbers = self.meet(Point { weights, velocity: None }, kept)?;
        weights.copy_from_slice(&numbers[..weights.len()]);
        self.exchanged = Memory::Home(numbers);
        self.habit.start(weights);
        Ok(())
    }

    /// The first worker has no more steps to make alone before all do something together: those who wait for it begin
    /// with what it has pushed.
    fn let_others_begin(&mut self) -> Result<(), CommError> {
        if self.joined != Some(false) {
            return Ok(());
        }
        self.joined = Some(true);
        let mut numbers = self.take_memory(true)?;
        numbers.fill(0.0);
        let order = self.ask(Order::new(What::Say(self.header(Command::Meet)), numbers))?;
        self.exchanged = Memory::Home(order.numbers);
        Ok(())
    }

    /// Where the first worker has stepped alone, it meets the others, which wait for that before their first step.
    fn meet_after_alone(&mut self, step: u64, weights: &mut [f32], is_over: bool) -> Result<bool, CommError> {
        let joined = *self.joined.get_or_insert(step >= self.alone);
        if joined || (self.rank() == Rank(0) && !is_over) {
            return Ok(false);
        }
        self.joined = Some(true);
        self.meet_with(weights, &mut [])?;
        Ok(true)
    }
}

impl Agreement for Worker {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.link.rank()
    }

    fn workers(&self) -> usize {
        self.layout.roles.workers
    }

    fn shares_steps(&self) -> bool {
        false
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        let order = self.ask(Order::new(What::Broadcast, numbers.to_vec()))?;
        numbers.copy_from_slice(&order.numbers);
        Ok(())
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.let_others_begin()?;
        let header = self.header(Command::Sum);
        let order = self.ask(Order::new(What::Say(header), numbers.to_vec()))?;
        numbers.copy_from_slice(&order.numbers);
        Ok(())
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.report = report;
        Ok(())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        Ok(self.report)
    }

    fn opened(&mut self, weights: &[f32]) {
        self.habit.start(weights);
    }

    fn tell_wishes(&mut self, own: Votes) -> Votes {
        self.own = own;
        self.heard.merge(own)
    }

    fn exchanges_before(&self, step: u64) -> bool {
        self.joined != Some(true) || self.habit.before(step).is_some()
    }

    fn readmit(&mut self, returned: Returned, states: &[f32]) -> Result<bool, CommError> {
        // While the first worker steps alone, the others wait for the end of that.
        if self.joined == Some(false) {
            return Ok(false);
        }
        let header = Header { number: returned.to_number(), ..self.header(Command::Readmit) };
        self.ask(Order::new(What::Say(header), states.to_vec()))?;
        Ok(true)
    }

    fn come_back(&mut self, steps: u64, states: &mut [f32], weights: &mut [f32]) -> Result<(), CommError> {
        (self.joined, self.steps) = (Some(true), steps);
        let numbers = self.take_memory(true)?;
        let order = Order::new(What::Say(self.header(Command::ComeBack)), numbers);
        let order = self.ask(Order { kept: vec![states.to_vec()], ..order })?;
        weights.copy_from_slice(&order.numbers[..weights.len()]);
        order.kept.iter().for_each(|given| states.copy_from_slice(given));
        self.exchanged = Memory::Home(order.numbers);
        self.habit.start(weights);
        Ok(())
    }

    fn begin_exchange(
        &mut self,
        step: u64,
        weights: &mut [f32],
        velocity: Option<(&[f32], f32)>,
    ) -> Result<bool, CommError> {
        self.steps = step;
        let met = self.meet_after_alone(step, weights, step >= self.alone)?;
        self.under_way = self.habit.before(step);
        if let Some(exchange) = self.under_way {
            self.begin(exchange, Point { weights, velocity })?;
        }
        Ok(met)
    }

    fn exchanges_after(&self, step: u64) -> bool {
        self.under_way.is_some() || self.habit.pushes_after(step)
    }

    fn end_exchange(&mut self, step: u64, weights: &mut [f32]) -> Result<bool, CommError> {
        self.steps = step + 1;
        let changed = self.end(weights)?;
        if self.habit.pushes_after(step) {
            (0..self.layout.pieces).try_for_each(|piece| {
                let exchange = Exchange { pushes: true, pulls: false, piece };
                self.begin(exchange, Point { weights, velocity: None })
            })?;
        }
        Ok(changed)
    }

    fn exchange_weights(&mut self, _: Reach, weights: &mut [f32], kept: &mut [Vec<f32>]) -> Result<(), CommError> {
        self.meet_after_alone(self.steps, weights, true)?;
        self.meet_with(weights, kept)
    }
}
