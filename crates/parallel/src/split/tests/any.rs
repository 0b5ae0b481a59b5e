//! What holds for any stages, micro-batches and times.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

#[derive(Clone, Debug)]
struct Pipeline {
    micro_batches: usize,
    times: Vec<StageTimes>,
    transfer_s: Vec<f64>,
}

impl Pipeline {
    fn schedule(&self, kind: Kind) -> Schedule {
        Schedule::with_transfers(kind, self.micro_batches, &self.times, &self.transfer_s)
    }

    fn forecast(&self, kind: Kind) -> Forecast {
        self.schedule(kind).forecast(&self.times, &self.transfer_s)
    }
}

fn time_s() -> impl Strategy<Value = f64> {
    prop_oneof![1 => Just(0.0), 4 => 0.1f64..1.0, 1 => 1.0f64..20.0]
}

fn stage_times() -> impl Strategy<Value = StageTimes> {
    let times = (time_s(), time_s(), time_s());
    times.prop_map(|(forward_s, inputs_s, weights_s)| StageTimes { forward_s, inputs_s, weights_s })
}

fn pipelines() -> impl Strategy<Value = Pipeline> {
    (1usize..7, 1usize..12).prop_flat_map(|(stages, micro_batches)| {
        let transfers = prop_oneof![Just(vec![0.0; stages - 1]), prop::collection::vec(time_s(), stages - 1)];
        let times = prop::collection::vec(stage_times(), stages);
        (times, transfers).prop_map(move |(times, transfer_s)| Pipeline { micro_batches, times, transfer_s })
    })
}

proptest! {
    #[test]
    fn every_schedule_is_whole_and_goes_through(pipeline in pipelines()) {
        for kind in Kind::ALL {
            let schedule = pipeline.schedule(kind);
            prop_assert_eq!(schedule.verify(), Ok(()));
            prop_assert_eq!(&schedule, &pipeline.schedule(kind), "the same times give the same lists");
            prop_assert_eq!((schedule.kind(), schedule.micro_batches()), (kind, pipeline.micro_batches));
            let passes = if schedule.separates_gradients() { 3 } else { 2 };
            for stage in 0..pipeline.times.len() {
                prop_assert_eq!(schedule.tasks(stage).len(), passes * pipeline.micro_batches);
            }
        }
    }

    #[test]
    fn no_step_is_shorter_than_its_slowest_stage_or_one_micro_batch(pipeline in pipelines()) {
        for kind in Kind::ALL {
            let forecast = pipeline.forecast(kind);
            let pass = |pass| {
                let all = pipeline.times.iter().map(|times| times.pass_s(pass, kind.separates_gradients()));
                all.sum::<f64>()
            };
            let there_and_back = pass(Pass::Forward) + pass(Pass::Backward) + 2.0 * pipeline.transfer_s.iter().sum::<f64>();
            let slowest = forecast.busy_s.iter().copied().fold(0.0, f64::max);
            prop_assert!(forecast.seconds >= slowest.max(there_and_back) * (1.0 - 1e-9));
            prop_assert!(forecast.speedup() <= forecast.bound() * (1.0 + 1e-9));
            prop_assert!((-1e-9..1.0).contains(&forecast.bubble()));
            for spans in &forecast.spans {
                prop_assert!(spans.windows(2).all(|pair| pair[0].end_s <= pair[1].begin_s), "one task at a time");
            }
        }
    }

    #[test]
    fn gradients_apart_are_never_slower_than_together(pipeline in pipelines()) {
        let [together, apart] = [Kind::OneForwardOneBackward, Kind::ZeroBubble].map(|kind| pipeline.forecast(kind).seconds);
        prop_assert!(apart <= together * (1.0 + 1e-9), "{} s and {} s", apart, together);
    }

    #[test]
    fn no_slot_is_shared_by_two_micro_batches(pipeline in pipelines()) {
        let stages = pipeline.times.len();
        for kind in Kind::ALL {
            let schedule = pipeline.schedule(kind);
            let last = if schedule.separates_gradients() { Pass::Weights } else { Pass::Backward };
            for stage in 0..stages {
                let most = match kind {
                    Kind::GPipe => pipeline.micro_batches,
                    Kind::OneForwardOneBackward => pipeline.micro_batches.min(stages - stage),
                    Kind::ZeroBubble => pipeline.micro_batches.min(stages),
                };
                prop_assert!((1..=most).contains(&schedule.slots(stage)));
                let mut owners = vec![None; schedule.slots(stage)];
                for task in schedule.tasks(stage) {
                    let slot = schedule.slot(stage, task.micro_batch);
                    if task.pass == Pass::Forward {
                        prop_assert_eq!(owners.iter().position(Option::is_none), Some(slot), "the lowest that is free");
                        owners[slot] = Some(task.micro_batch);
                    }
                    prop_assert_eq!(owners[slot], Some(task.micro_batch));
                    if task.pass == last {
                        owners[slot] = None;
                    }
                }
            }
        }
    }

    #[test]
    fn two_tasks_in_each_others_place_are_found_out(
        pipeline in pipelines(), stage: prop::sample::Index, pick: [prop::sample::Index; 2],
    ) {
        for kind in Kind::ALL {
            let mut schedule = pipeline.schedule(kind);
            let stage = stage.index(schedule.stages());
            let [a, b] = pick.map(|index| index.index(schedule.tasks(stage).len()));
            let [one, other] = [a, b].map(|index| schedule.tasks(stage)[index]);
            // Other pairs may have no order between them.
            if a != b && (one.pass == other.pass || one.micro_batch == other.micro_batch) {
                schedule.tasks[stage].swap(a, b);
                prop_assert!(schedule.verify().is_err());
            }
        }
    }

    #[test]
    fn a_drawing_stays_within_its_width(pipeline in pipelines(), width in 0usize..160) {
        for kind in Kind::ALL {
            let text = draw(&pipeline.schedule(kind), &pipeline.times, &pipeline.transfer_s, width);
            prop_assert_eq!(text.lines().count(), pipeline.times.len());
            prop_assert!(text.is_ascii() && text.lines().all(|line| line.len() <= width), "{}", text);
        }
    }

    #[test]
    fn a_drawing_shows_every_task_if_there_is_room(pipeline in pipelines()) {
        for kind in Kind::ALL {
            let schedule = pipeline.schedule(kind);
            let text = draw(&schedule, &pipeline.times, &pipeline.transfer_s, 1000);
            for (stage, line) in text.lines().enumerate() {
                let row = line.split('|').nth(1).unwrap_or_default();
                let words = row.split_whitespace().map(|word| word.trim_start_matches('.').trim_end_matches('-'));
                let names = words.filter(|word| !word.is_empty());
                let expected: Vec<String> = schedule.tasks(stage).iter().map(Task::to_string).collect();
                prop_assert_eq!(names.collect::<Vec<_>>(), expected, "{}", text);
            }
        }
    }
}

/// Every order of a stage's tasks that keeps the order of each pass and the slots.
fn every_list(micro_batches: usize, slots: usize) -> Vec<Vec<Task>> {
    let mut lists = vec![(vec![], [0; 3])];
    for _ in 0..3 * micro_batches {
        lists = lists
            .into_iter()
            .flat_map(|(tasks, done): (Vec<Task>, [usize; 3])| {
                let [forward, backward, weights] = done;
                let may =
                    [forward < micro_batches && forward - weights < slots, backward < forward, weights < backward];
                [Pass::Forward, Pass::Backward, Pass::Weights].into_iter().filter(move |&pass| may[pass as usize]).map(
                    move |pass| {
                        let (mut tasks, mut done) = (tasks.clone(), done);
                        tasks.push(Task { micro_batch: done[pass as usize], pass });
                        done[pass as usize] += 1;
                        (tasks, done)
                    },
                )
            })
            .collect();
    }
    lists.into_iter().map(|(tasks, _)| tasks).collect()
}

fn shortest_of_all(micro_batches: usize, times: &[StageTimes]) -> f64 {
    let (stages, transfer_s) = (times.len(), vec![0.0; times.len() - 1]);
    let lists = every_list(micro_batches, stages.min(micro_batches));
    let schedules = (0..lists.len().pow(stages as u32)).map(|mut number| {
        let mut tasks = Vec::new();
        for _ in 0..stages {
            tasks.push(lists[number % lists.len()].clone());
            number /= lists.len();
        }
        Schedule::from_tasks(Kind::ZeroBubble, micro_batches, tasks)
    });
    let whole = schedules.filter(|schedule| schedule.verify().is_ok());
    whole.map(|schedule| schedule.forecast(times, &transfer_s).seconds).fold(f64::INFINITY, f64::min)
}

#[test]
fn no_schedule_at_all_is_shorter_where_all_can_be_tried() {
    let mut runner = TestRunner::deterministic();
    for (stages, micro_batches, cases) in [(2, 2, 100), (2, 3, 100), (2, 4, 10), (3, 3, 2)] {
        for _ in 0..cases {
            let times = prop::collection::vec(stage_times(), stages).new_tree(&mut runner).unwrap().current();
            let (found, best) =
                (seconds(Kind::ZeroBubble, micro_batches, &times), shortest_of_all(micro_batches, &times));
            assert!(found <= best * (1.0 + 1e-9), "{found} s, and {best} s are possible with {times:?}");
        }
    }
}
