//! The study's claims, each with its numbers and a verdict. A difference below 3% is none.

use super::cells::{
    BATCHES, FLAT_RING, HALVES, ONE_CORE, PROCESSES, STAGES, Side, TWO_BY_TWO, TWO_NODES, TWO_THREADS, WORKS, Work,
};
use super::results::{Results, gradient_bytes, sent_bytes};

/// What is no difference.
const SAME: f64 = 0.03;

/// A claim, what became of it, and why.
pub struct Judged {
    /// Its letter and words.
    pub claim: &'static str,
    /// Confirmed, refuted, or what else.
    pub verdict: String,
    /// The numbers.
    pub numbers: Vec<String>,
}

/// All seven.
pub fn judge(results: &Results) -> Vec<Judged> {
    vec![
        small_sets(results),
        processes(results),
        Judged {
            claim: "(c) on GPUs, model parallel beats data parallel",
            verdict: "not decidable here".into(),
            numbers: vec!["There is no GPU in this machine, and the claim needs several.".into()],
        },
        stages(results),
        pipelining(results),
        bytes(results),
        halves(results),
    ]
}

/// A comparison of two set-ups for each work and batch that was measured: how many times as long the first takes.
fn ratios(results: &Results, works: &[Work], [first, second]: [&str; 2]) -> Vec<(Work, u32, f64)> {
    let cells = works.iter().flat_map(|&work| BATCHES.map(move |batch| (work, batch)));
    let ratio = |(work, batch): (Work, u32)| {
        let of = |setup| results.step(work, batch, setup, Side::Paceline).filter(|step| step.measured);
        Some((work, batch, of(first)?.median / of(second)?.median))
    };
    cells.filter_map(ratio).collect()
}

fn line((work, batch, ratio): &(Work, u32, f64), words: &str) -> String {
    format!("{} at batch {batch}: {ratio:.2}× {words}", work.name)
}

/// Of ratios that a claim says are above one.
fn verdict(ratios: &[f64]) -> String {
    let (above, below) =
        (ratios.iter().filter(|&&r| r > 1.0 + SAME).count(), ratios.iter().filter(|&&r| r < 1.0 - SAME).count());
    match (ratios.len(), above, below) {
        (0, ..) => "not measured".into(),
        (all, above, _) if above == all => "confirmed".into(),
        (_, 0, 0) => "refuted: there is no difference".into(),
        (all, 0, below) => format!("refuted: the opposite in {below} of {all} cases, no difference in the others"),
        (all, above, below) => format!("only in part: so in {above} of {all} cases, the opposite in {below}"),
    }
}

fn small_sets(results: &Results) -> Judged {
    let node = ratios(results, &WORKS, [TWO_NODES, ONE_CORE]);
    let machine: Vec<_> = WORKS
        .iter()
        .flat_map(|&work| BATCHES.map(move |batch| (work, batch)))
        .filter_map(|(work, batch)| {
            let of = |setup| results.step(work, batch, setup, Side::Paceline).filter(|step| step.measured);
            let best =
                [TWO_THREADS, PROCESSES].into_iter().filter_map(|setup| Some(of(setup)?.median)).reduce(f64::min)?;
            Some((work, batch, of(TWO_NODES)?.median / best))
        })
        .collect();
    // The claim is about the small set; the large one stands beside it.
    let small: Vec<f64> = node.iter().filter(|(work, ..)| *work == WORKS[0]).map(|(.., ratio)| *ratio).collect();
    let slower = small.iter().filter(|ratio| **ratio > 1.0 + SAME).count();
    let verdict = match (small.len(), slower) {
        (0, _) => "not measured".to_owned(),
        (_, 0) => "refuted for nodes of one core and this link: two are never slower than one".into(),
        (all, slower) => format!("confirmed: in {slower} of {all} cases"),
    };
    let numbers = node.iter().map(|ratio| line(ratio, "the time of one such node"));
    let numbers = numbers.chain(machine.iter().map(|ratio| line(ratio, "the time of both cores in one node")));
    Judged {
        claim: "(a) on a small set, distribution can be slower than one node",
        verdict,
        numbers: numbers.collect(),
    }
}

fn processes(results: &Results) -> Judged {
    let found = ratios(results, &WORKS, [TWO_THREADS, PROCESSES]);
    let numbers = found.iter().map(|ratio| line(ratio, "as long by two threads as by two processes")).collect();
    let claim = "(b) on CPUs, several processes beat several threads";
    Judged { claim, verdict: verdict(&found.iter().map(|(.., ratio)| *ratio).collect::<Vec<_>>()), numbers }
}

fn stages(results: &Results) -> Judged {
    let found = ratios(results, &WORKS, [STAGES[0].0, ONE_CORE]);
    let numbers =
        found.iter().map(|ratio| line(ratio, "the time of one core, by two cores with a stage each")).collect();
    let faster = found.iter().filter(|(.., ratio)| *ratio < 1.0 - SAME).count();
    let verdict = match (found.len(), faster) {
        (0, _) => "not measured".to_owned(),
        (_, 0) => {
            "confirmed for stages without micro-batches: a second core buys nothing; with micro-batches see (e)".into()
        }
        (all, faster) => format!("only in part: a second core helps in {faster} of {all} cases even so"),
    };
    Judged { claim: "(d) model parallel on CPUs is overhead only", verdict, numbers }
}

fn pipelining(results: &Results) -> Judged {
    let (mut numbers, mut gains) = (Vec::new(), Vec::new());
    for work in WORKS {
        for batch in BATCHES {
            let of = |setup| {
                results.step(work, batch, setup, Side::Paceline).filter(|step| step.measured).map(|step| step.median)
            };
            let Some(one) = of(STAGES[0].0) else { continue };
            let found = STAGES[1..].iter().filter_map(|(setup, m)| Some((*m, one / of(setup)?)));
            let Some((m, gain)) = found.reduce(|a, b| if b.1 > a.1 { b } else { a }) else { continue };
            gains.push(gain);
            let alone = of(ONE_CORE).map_or(String::new(), |alone| format!(", {:.2}× one core", gain * alone / one));
            numbers.push(format!("{} at batch {batch}: {gain:.2}× with {m} micro-batches{alone}", work.name));
        }
    }
    let (least, most) = gains.iter().fold((f64::MAX, 0.0f64), |(least, most), &gain| (least.min(gain), most.max(gain)));
    let verdict = match gains.len() {
        0 => "not measured".to_owned(),
        _ if most <= 1.0 + SAME => "refuted: it never pays".into(),
        _ if most - least <= 2.0 * SAME => {
            format!("only in part: it pays, but as much everywhere ({least:.2} to {most:.2}×)")
        }
        _ => format!("confirmed: {least:.2} to {most:.2}×"),
    };
    Judged { claim: "(e) pipelining pays depending on batch and model", verdict, numbers }
}

fn bytes(results: &Results) -> Judged {
    let mut numbers = Vec::new();
    let mut share = |work: Work, batch: u32, setup: &str, expected: f64| {
        let cell = results.cell(work, batch, setup)?;
        let found = sent_bytes(cell)? / gradient_bytes(cell)?;
        numbers.push(format!(
            "{} at batch {batch}, {setup}: {found:.2} S a step out of a node; arithmetic says {expected:.2}",
            work.name
        ));
        Some(found)
    };
    for work in WORKS {
        for &batch in work.measured {
            share(work, batch, TWO_NODES, 1.0);
        }
    }
    let (one, flat) = (share(WORKS[1], 8, TWO_BY_TWO, 1.0), share(WORKS[1], 8, FLAT_RING, 1.5));
    numbers.push("Four processes a node are more than two cores can tell of: a flat ring of eight has 2 · 7/8 = 1.75 S by arithmetic.".into());
    let verdict = match (one, flat) {
        (Some(one), Some(flat)) if flat > 1.3 * one => {
            format!("confirmed: {one:.2} S against {flat:.2} S with two processes a node")
        }
        (Some(one), Some(flat)) => format!("refuted: {one:.2} S against {flat:.2} S"),
        _ => "not measured".into(),
    };
    Judged { claim: "(f) less network than a flat ring: S against 1.5 S and 1.75 S at two nodes", verdict, numbers }
}

fn halves(results: &Results) -> Judged {
    let mut numbers = Vec::new();
    let mut uneven = Vec::new();
    for work in WORKS {
        for batch in BATCHES {
            let Some(cell) = results.cell(work, batch, HALVES) else { continue };
            let seconds = |stage: &serde_json::Value| {
                ["forward_s", "inputs_s", "weights_s"].iter().filter_map(|field| stage[field].as_f64()).sum::<f64>()
            };
            let times: Vec<f64> = cell["pipeline"]["stages"].as_array().into_iter().flatten().map(seconds).collect();
            let &[first, second] = &times[..] else { continue };
            let share = 100.0 * first / (first + second);
            uneven.push((share - 50.0).abs() > 5.0);
            numbers.push(format!(
                "{} cut behind {}, batch {batch}: {share:.0}:{:.0} by measured time",
                work.name,
                work.halves,
                100.0 - share
            ));
        }
    }
    numbers.push("By arithmetic alexnet has 78:22 and vgg16 66:34.".into());
    let verdict = match (uneven.len(), uneven.iter().filter(|uneven| **uneven).count()) {
        (0, _) => "not measured".to_owned(),
        (all, found) if found == all => "refuted: nowhere".into(),
        (_, 0) => "confirmed".into(),
        (all, found) => format!("only in part: not in {found} of {all} cases"),
    };
    Judged { claim: "(g) the two halves take the same time", verdict, numbers }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_follow_from_numbers() {
        assert_eq!(verdict(&[]), "not measured");
        assert_eq!(verdict(&[1.2, 1.04]), "confirmed");
        assert_eq!(verdict(&[1.01, 0.99]), "refuted: there is no difference");
        assert!(verdict(&[0.9, 1.0]).starts_with("refuted: the opposite in 1 of 2"));
        assert!(verdict(&[0.9, 1.1, 1.0]).starts_with("only in part: so in 1 of 3"));
    }
}
