//! How workers that make their own steps exchange weights: the options of all such agreements, and whose each is.

use super::Demands;

/// What was not said is the agreement's own choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoundOptions {
    /// Steps between two exchanges of all workers, or of a worker with the centre.
    pub period: Option<u64>,
    /// Steps between two exchanges of the workers of each machine.
    pub node_period: Option<u64>,
    /// Parts of the weights that are exchanged one after the other in the steps of a round.
    pub fragments: Option<u64>,
    /// Steps at the beginning that are each followed by an exchange of all.
    pub warm_up: Option<u64>,
    /// The rate of a step that is made with what a round has changed.
    pub outer_rate: Option<f64>,
    /// The momentum of those steps.
    pub outer_momentum: Option<f64>,
    /// How much of what is between a worker and the centre both move in an exchange.
    pub elastic_rate: Option<f64>,
    /// Steps between two fetches of the centre.
    pub fetch_every: Option<u64>,
    /// Steps between two pushes of what a worker has changed.
    pub push_every: Option<u64>,
    /// How much of what is pushed the servers add.
    pub push_rate: Option<f64>,
    /// Whether an update counts less the more others it has missed.
    pub staleness_aware: bool,
    /// The rate of a step that servers make with Adagrad of what is pushed.
    pub server_adagrad: Option<f64>,
    /// Steps at the beginning that one worker makes alone.
    pub warm_start: Option<u64>,
    /// Copies of the weights that the threads of one process share.
    pub herds: Option<usize>,
    /// Changes of weights and gradients that tell of the curvature.
    pub history: Option<usize>,
}

impl RoundOptions {
    /// How much an update counts that has missed so many others, η / (1 + staleness) if that is wanted.
    pub(super) fn share_of_missed(&self, missed: u64) -> f32 {
        if self.staleness_aware { 1.0 / (1 + missed) as f32 } else { 1.0 }
    }

    /// The flags that were given, each with the agreements that know it.
    fn given(&self) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
        const LOCAL: &[&str] = &["local"];
        const DOWNPOUR: &[&str] = &["downpour"];
        let all: [(&str, bool, &[&str]); 15] = [
            ("--period", self.period.is_some(), &["local", "elastic", "dogwild", "hogwild", "shm-async", "shm-hybrid"]),
            ("--node-period", self.node_period.is_some(), LOCAL),
            ("--fragments", self.fragments.is_some(), LOCAL),
            ("--post-local", self.warm_up.is_some(), LOCAL),
            ("--outer-rate", self.outer_rate.is_some(), LOCAL),
            ("--outer-momentum", self.outer_momentum.is_some(), LOCAL),
            ("--elastic-rate", self.elastic_rate.is_some(), &["elastic", "shm-async", "shm-hybrid"]),
            ("--fetch-every", self.fetch_every.is_some(), DOWNPOUR),
            ("--push-every", self.push_every.is_some(), DOWNPOUR),
            ("--push-rate", self.push_rate.is_some(), &["downpour", "dogwild"]),
            ("--staleness-aware", self.staleness_aware, &["parameter-server", "downpour", "dogwild"]),
            ("--server-adagrad", self.server_adagrad.is_some(), DOWNPOUR),
            ("--warm-start", self.warm_start.is_some(), DOWNPOUR),
            ("--herds", self.herds.is_some(), &["hogwild"]),
            ("--history", self.history.is_some(), &["sandblaster"]),
        ];
        all.into_iter().filter(|(_, given, _)| *given).map(|(flag, _, owners)| (flag, owners))
    }
}

impl Demands {
    /// An option that another agreement knows and this one does not: a sentence that says what to type.
    pub fn foreign(&self, name: &str) -> Option<String> {
        const CENTER: &[&str] = &["elastic", "downpour", "dogwild", "shm-hybrid"];
        let group = (self.options.group > 1).then_some(("--group", CENTER));
        let given = self.options.rounds.given().chain(group);
        let (flag, owners) = given.into_iter().find(|(_, owners)| !owners.contains(&name))?;
        let typed: Vec<String> = owners.iter().map(|owner| format!("--agree {owner}")).collect();
        let typed = typed.join(" or ");
        Some(format!("{flag} is for {typed}, and not for --agree {name}; type {typed}, or leave it out"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Options;
    use super::*;

    #[test]
    fn an_option_of_another_agreement_is_refused_by_name() {
        let said = |name: &str, rounds: RoundOptions| {
            let options = Options { rounds, ..Options::default() };
            Demands { options, ..Demands::default() }.foreign(name)
        };
        let period = RoundOptions { period: Some(4), ..RoundOptions::default() };
        assert_eq!((said("local", period), said("elastic", period)), (None, None));
        let sentence = said("all-reduce", period).unwrap();
        assert!(
            sentence.ends_with("--agree hogwild or --agree shm-async or --agree shm-hybrid, or leave it out"),
            "{sentence}"
        );
        let fetch = RoundOptions { fetch_every: Some(4), ..RoundOptions::default() };
        assert!(said("elastic", fetch).unwrap().contains("--agree downpour"));
        assert_eq!(said("downpour", fetch), None);
    }

    #[test]
    fn every_owner_of_an_option_exists() {
        let some = Some(1);
        let all = RoundOptions {
            period: some,
            node_period: some,
            fragments: some,
            warm_up: some,
            outer_rate: Some(1.0),
            outer_momentum: Some(1.0),
            elastic_rate: Some(1.0),
            fetch_every: some,
            push_every: some,
            push_rate: Some(1.0),
            staleness_aware: true,
            server_adagrad: Some(1.0),
            warm_start: some,
            herds: Some(1),
            history: Some(1),
        };
        assert!(all.given().flat_map(|(_, owners)| owners).all(|owner| super::super::find(owner).is_some()));
        assert_eq!(all.given().count(), 15);
    }
}
