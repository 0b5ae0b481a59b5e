//! The thread that carries a worker's messages to the servers of a centre, and the two queues between them.
//!
//! What is to be carried is an [`Order`]. It comes back in the order in which it was given, with what the servers have
//! sent in its memory, so that nothing is shared and steps go on meanwhile.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::error::Party;
use paceline_comm::memory_box::{Lending, WHEREABOUTS, Whereabouts};
use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::threads;

use super::super::parameter_server::talk::Call;
use super::super::returned::{MET, met_of_servers};
use super::lent::Borrowed;
use super::message::{Command, HEADER, Header, Layout, MEETS, TOLD, Told, transfer};

/// The name in errors, and the thread's.
pub(super) const PHASE: &str = "centre";

/// Orders that may be under way: an exchange and a push behind it, and what all do together.
const UNDER_WAY_MAX: usize = 4;

/// What is carried.
#[derive(Debug)]
pub(super) enum What {
    /// What a header says, and what follows it.
    Say(Header),
    /// Numbers that become those of rank 0, before the first step.
    Broadcast,
}

/// Something to be carried, and what has come of it.
#[derive(Debug)]
pub(super) struct Order {
    pub what: What,
    /// What goes out, and then what came.
    pub numbers: Vec<f32>,
    /// Where the agreement's own buffers go to, of the first worker; running statistics, where a worker comes back.
    pub kept: Vec<Vec<f32>>,
    pub told: Told,
}

impl Order {
    pub fn new(what: What, numbers: Vec<f32>) -> Self {
        Self { what, numbers, kept: Vec::new(), told: Told::default() }
    }
}

/// A worker's end of the thread.
#[derive(Debug)]
pub(super) struct Link {
    rank: Rank,
    orders: Option<SyncSender<Order>>,
    replies: Receiver<Result<Order, CommError>>,
    thread: Option<JoinHandle<()>>,
    deadline: Duration,
}

impl Link {
    /// Starts the thread, which ends with a goodbye when the link is dropped.
    pub fn start(
        communicator: Communicator,
        layout: Layout,
        lent: Option<(Lending, f32)>,
        deadline: Duration,
    ) -> Result<Self, CommError> {
        let rank = communicator.rank();
        let ((orders, inbox), (outbox, replies)) = (sync_channel::<Order>(UNDER_WAY_MAX), sync_channel(UNDER_WAY_MAX));
        let words = vec![0.0; HEADER];
        let mut carrier = Carrier {
            communicator,
            layout,
            words,
            tag: 0,
            meets: MEETS,
            version: 0,
            computed_from: 0,
            lent,
            borrowed: None,
            added: None,
        };
        let body = move || {
            while let Ok(order) = inbox.recv() {
                let carried = carrier.carry(order);
                let failed = carried.is_err();
                // Nobody listens any more if the worker is gone.
                if outbox.send(carried).is_err() || failed {
                    return;
                }
                if let Err(error) = carrier.carry_on() {
                    let _ = outbox.send(Err(error));
                    return;
                }
            }
            // A server that is gone needs none.
            let _ = carrier.say(Header::new(Command::Goodbye));
        };
        let thread =
            threads::spawn(PHASE, body).map_err(|source| CommError::System { rank, what: "start a thread", source })?;
        Ok(Self { rank, orders: Some(orders), replies, thread: Some(thread), deadline })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Has something carried. Where the thread has failed, the next [`Link::take`] says why.
    pub fn give(&self, order: Order) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(order);
        }
    }

    /// The oldest order that has not come back; waits for it.
    pub fn take(&self) -> Result<Order, CommError> {
        let (rank, phase, waited) = (self.rank, PHASE, self.deadline);
        self.replies.recv_timeout(self.deadline).map_err(|error| match error {
            RecvTimeoutError::Disconnected => CommError::Broken { rank, phase },
            RecvTimeoutError::Timeout => CommError::DeadlinePassed { rank, peer: Party::Anyone, phase, waited },
        })?
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Without orders the thread ends; one that waits for a dead rank has a deadline.
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Carrier {
    communicator: Communicator,
    layout: Layout,
    words: Vec<f32>,
    /// Counts this worker's own exchanges, and those that all make together.
    tag: u64,
    meets: u64,
    /// What the servers have said last of their version, and when the last push began to be computed.
    version: u64,
    computed_from: u64,
    /// Where memory boxes are, if the centre lies in one, and how far both move in an exchange.
    lent: Option<(Lending, f32)>,
    borrowed: Option<Borrowed>,
    /// What is said once an increment has been added: behind the worker's back.
    added: Option<Header>,
}

impl Carrier {
    fn carry(&mut self, mut order: Order) -> Result<Order, CommError> {
        match order.what {
            What::Broadcast => self.communicator.broadcast(Rank(0), &mut order.numbers)?,
            What::Say(header) => match header.command {
                Command::Exchange { pushes, pulls } => {
                    order.told = self.exchange(header, (pushes, pulls), &mut order)?
                }
                Command::Meet => order.told = self.meet(header, &mut order)?,
                Command::Sum => self.sum(header, &mut order.numbers)?,
                Command::Readmit => self.readmit(header, &mut order.numbers)?,
                Command::ComeBack => order.told = self.come_back(header, &mut order)?,
                Command::Goodbye | Command::Whereabouts | Command::Changed => {}
            },
        }
        Ok(order)
    }

    fn worker(&self) -> usize {
        self.communicator.rank().index()
    }

    /// Says to all servers what follows.
    fn say(&mut self, header: Header) -> Result<(), CommError> {
        self.words.copy_from_slice(&header.to_words());
        let (worker, roles) = (self.worker(), self.layout.roles);
        let to = |server: usize| transfer(worker, Action::Send, roles.server(server), 0..HEADER);
        let list: Vec<Transfer> = (0..roles.servers).filter_map(to).collect();
        self.tag += 1;
        self.communicator.exchange(&list, self.tag, &mut self.words)
    }

    /// A push has been computed from what this worker had read when the one before it left.
    fn exchange(
        &mut self,
        header: Header,
        (pushes, pulls): (bool, bool),
        order: &mut Order,
    ) -> Result<Told, CommError> {
        if self.lent.is_some() {
            return self.exchange_there(header, &mut order.numbers);
        }
        self.say(Header { version: self.computed_from, ..header })?;
        self.tag += 1;
        let list = self.layout.exchange(self.worker(), header.number as usize, pushes, pulls);
        self.communicator.exchange(&list, self.tag, &mut order.numbers)?;
        let told = if pulls { self.told(&order.numbers) } else { Told::default() };
        if pushes {
            self.computed_from = self.version;
        }
        Ok(told)
    }

    /// Exchanges with a centre in a memory box: the server hears of it when it is done.
    fn exchange_there(&mut self, header: Header, numbers: &mut [f32]) -> Result<Told, CommError> {
        if self.borrowed.is_none() {
            self.borrow()?;
        }
        let Some(borrowed) = &mut self.borrowed else { return Ok(Told::default()) };
        let votes = borrowed.read_and_write(&mut numbers[..self.layout.elements])?;
        self.added = Some(Header { command: Command::Changed, ..header });
        Ok(Told { votes, ..Told::default() })
    }

    /// What of an exchange is left when the worker has what it waits for.
    fn carry_on(&mut self) -> Result<(), CommError> {
        let Some((header, borrowed)) = self.added.take().zip(self.borrowed.as_mut()) else { return Ok(()) };
        let missed = borrowed.accumulate()?;
        self.say(Header { version: missed, ..header })
    }

    /// Asks the servers where their parts of the centre lie, and attaches them.
    fn borrow(&mut self) -> Result<(), CommError> {
        self.say(Header::new(Command::Whereabouts))?;
        let (worker, Layout { roles, .. }) = (self.worker(), self.layout);
        let of = |server: usize| {
            let range = WHEREABOUTS * server..WHEREABOUTS * (server + 1);
            transfer(worker, Action::Receive, roles.server(server), range)
        };
        let mut words = vec![0.0; WHEREABOUTS * roles.servers];
        self.tag += 1;
        let list: Vec<Transfer> = (0..roles.servers).filter_map(of).collect();
        self.communicator.exchange(&list, self.tag, &mut words)?;
        let Some((lending, rate)) = &self.lent else { return Ok(()) };
        let told = |server: usize| {
            let rank = self.communicator.world_rank(roles.server(server));
            (Whereabouts::from_words(&words.as_chunks::<WHEREABOUTS>().0[server]), rank)
        };
        self.borrowed = Some(Borrowed::find(
            lending,
            (self.communicator.world_rank(self.communicator.rank()), &self.layout),
            *rate,
            told,
        )?);
        Ok(())
    }

    /// Pushes all, and takes the centre, once all have come here.
    fn meet(&mut self, header: Header, order: &mut Order) -> Result<Told, CommError> {
        self.say(Header { version: self.computed_from, ..header })?;
        self.tag += 1;
        self.communicator.exchange(&self.layout.pushes(self.worker()), self.tag, &mut order.numbers)?;
        self.meets += 1;
        let takes = self.layout.takes(self.worker(), true);
        self.communicator.exchange(&takes, self.meets, &mut order.numbers)?;
        for kept in &mut order.kept {
            self.meets += 1;
            if self.worker() == 0 {
                let takes = self.layout.takes(0, false);
                self.communicator.exchange(&takes, self.meets, kept)?;
            }
        }
        let told = self.told(&order.numbers);
        self.computed_from = self.version;
        Ok(told)
    }

    /// Says who is back, with running statistics for it to the first server; the others count that.
    fn readmit(&mut self, header: Header, states: &mut [f32]) -> Result<(), CommError> {
        self.say(header)?;
        self.tag += 1;
        let to = self.layout.roles.server(0);
        let list: Vec<Transfer> = transfer(self.worker(), Action::Send, to, 0..states.len()).into_iter().collect();
        self.communicator.exchange(&list, self.tag, states)
    }

    /// Takes the centre as it is, how often all have met, and running statistics, which come in place of buffers.
    fn come_back(&mut self, header: Header, order: &mut Order) -> Result<Told, CommError> {
        self.say(header)?;
        self.tag += 1;
        let (worker, Layout { roles, .. }) = (self.worker(), self.layout);
        let (told, states) = (self.layout.message(), order.kept.first().map_or(0, Vec::len));
        let at = |server: usize| told + MET * server..told + MET * (server + 1);
        let behind = told + MET * roles.servers;
        order.numbers.resize(behind + states, 0.0);
        let of = |server: usize| {
            let states = if server == 0 { behind..behind + states } else { 0..0 };
            let ranges = [self.layout.part(server), self.layout.told(server), at(server), states];
            ranges.into_iter().filter_map(move |range| transfer(worker, Action::Receive, roles.server(server), range))
        };
        let list: Vec<Transfer> = (0..roles.servers).flat_map(of).collect();
        self.communicator.exchange(&list, self.tag, &mut order.numbers)?;
        self.meets = MEETS + met_of_servers(self.communicator.rank(), &order.numbers[told..behind])?;
        order.kept.iter_mut().for_each(|states| states.copy_from_slice(&order.numbers[behind..]));
        order.numbers.truncate(told);
        let told = self.told(&order.numbers);
        self.computed_from = self.version;
        Ok(told)
    }

    /// What the servers have said behind their numbers.
    fn told(&mut self, numbers: &[f32]) -> Told {
        let of = |server: usize| {
            let mut words = [0.0; TOLD];
            words.copy_from_slice(&numbers[self.layout.told(server)]);
            Told::from_words(&words)
        };
        let told = (0..self.layout.roles.servers).map(of).reduce(Told::merge).unwrap_or_default();
        self.version = told.version;
        told
    }

    /// Numbers become their sum over all workers, with a word for every server behind them.
    fn sum(&mut self, header: Header, numbers: &mut Vec<f32>) -> Result<(), CommError> {
        let (length, roles, worker) = (numbers.len(), self.layout.roles, self.worker());
        self.say(Header { number: length as u64, ..header })?;
        numbers.resize(length + roles.servers, 0.0);
        for call in Call::pair(length) {
            self.meets += 1;
            self.communicator.exchange(&call.worker(roles, worker), self.meets, numbers)?;
        }
        numbers.truncate(length);
        Ok(())
    }
}
