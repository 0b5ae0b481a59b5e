//! Lists for people: each rank's transfers, bytes and forecast time, as `paceline plan --workers` prints them.

use std::fmt::Write;

use crate::choose::Choice;
use crate::collective::{Algorithm, Collective, transfers};
use crate::cost::{Forecast, forecast};
use crate::rank::Rank;
use crate::transfer::Transfer;

/// One rank's part in a collective.
#[derive(Clone, Debug, PartialEq)]
pub struct RankPlan {
    /// The rank whose part it is.
    pub rank: Rank,
    /// What it will do, in order.
    pub transfers: Vec<Transfer>,
    /// What that will take.
    pub forecast: Forecast,
}

/// What all ranks will do for one buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectivePlan {
    /// The operation.
    pub collective: Collective,
    /// The algorithm that the choice names for this length.
    pub algorithm: Algorithm,
    /// Elements of the buffer.
    pub length: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// By rank.
    pub ranks: Vec<RankPlan>,
}

/// Plans one collective for every rank.
pub fn plan(collective: Collective, choice: &Choice, length: usize, element_bytes: usize) -> CollectivePlan {
    let algorithm = choice.algorithm(collective, length * element_bytes);
    let links = choice.links();
    let ranks = (0..links.nodes.world()).map(Rank::at).map(|rank| {
        let transfers = transfers(collective, algorithm, rank, &links.nodes, length);
        let forecast = forecast(&transfers, element_bytes, &links.between);
        RankPlan { rank, transfers, forecast }
    });
    CollectivePlan { collective, algorithm, length, element_bytes, ranks: ranks.collect() }
}

impl CollectivePlan {
    /// The forecast of the slowest rank.
    pub fn seconds(&self) -> f64 {
        self.ranks.iter().map(|plan| plan.forecast.seconds).fold(0.0, f64::max)
    }

    /// The plan as text; with `details`, every transfer on its own line.
    pub fn text(&self, details: bool) -> String {
        let mut text = format!(
            "{} of {} elements ({} bytes) by {}: forecast {:.3} ms\n",
            self.collective,
            self.length,
            self.length * self.element_bytes,
            self.algorithm,
            self.seconds() * 1e3
        );
        for RankPlan { rank, transfers, forecast } in &self.ranks {
            let Forecast { steps, messages, sent_bytes, received_bytes, seconds } = forecast;
            let _ = writeln!(
                text,
                "  {rank}: {steps} steps, {messages} messages, {sent_bytes} bytes out, {received_bytes} in, {:.3} ms",
                seconds * 1e3
            );
            for transfer in transfers.iter().filter(|_| details) {
                let _ = writeln!(text, "    {transfer}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Link, Links};

    #[test]
    fn a_plan_shows_every_rank_and_every_transfer() {
        let links = Links::uniform(3, Link::new(1e-3, 1e6));
        let choice = Choice::by_cost(links).forced(Some(Algorithm::Ring));
        let text = plan(Collective::AllReduce, &choice, 6, 4).text(true);
        let expected = "all_reduce of 6 elements (24 bytes) by ring: forecast 4.032 ms
  rank 0: 4 steps, 4 messages, 32 bytes out, 32 in, 4.032 ms
    step 0: send 4..6 to rank 1
    step 0: add 2..4 from rank 2
    step 1: send 2..4 to rank 1
    step 1: add 0..2 from rank 2
    step 2: send 0..2 to rank 1
    step 2: receive 4..6 from rank 2
    step 3: send 4..6 to rank 1
    step 3: receive 2..4 from rank 2
  rank 1: ";
        assert!(text.starts_with(expected), "{text}");
    }
}
