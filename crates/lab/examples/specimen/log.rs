//! A made-up run that looks like a real one: a small residual network over ten epochs, with noise, a warm-up, a slow
//! stretch of the loader, a crash, a resume and warnings. For the tests, and for looking at the report without training.

use paceline_system::event::{Event, Line, SCHEMA_VERSION};
use paceline_system::host::Host;
use paceline_system::phase::Phase;
use paceline_system::random::Random;

/// Steps in one epoch.
pub const EPOCH_STEPS: u64 = 390;

/// The lines of a made-up run of `epochs` epochs that crashes at `crash_step`, is resumed from the last whole epoch, and
/// ends with `finish`, if any.
pub fn lines(epochs: u64, crash_step: Option<u64>, finish: Option<Event>) -> Vec<Line> {
    let total = epochs * EPOCH_STEPS;
    let mut log = Log { lines: Vec::new(), time_s: 0.0, random: Random::new(&[2026]), total };
    log.start(0, 1_790_000_000);
    if let Some(crash_step) = crash_step {
        log.train(1, crash_step);
        log.time_s = 0.0;
        let resumed = crash_step / EPOCH_STEPS * EPOCH_STEPS;
        log.start(resumed, 1_790_003_600);
        log.train(resumed + 1, total);
    } else {
        log.train(1, total);
    }
    if let Some(event) = finish {
        log.push(event);
    }
    log.lines
}

/// The end of a run where all went well.
pub fn done(step: u64) -> Event {
    Event::RunFinished { step, reason: "done".into(), error: None, seconds: 611.8, peak_memory_bytes: 1_234_567_890 }
}

struct Log {
    lines: Vec<Line>,
    time_s: f64,
    random: Random,
    total: u64,
}

impl Log {
    fn push(&mut self, event: Event) {
        self.lines.push(Line { time_s: self.time_s, rank: 0, event });
    }

    fn start(&mut self, resumed_step: u64, unix_s: u64) {
        let host = Host {
            name: "tourmalet".into(),
            cpu: "AMD EPYC 9R14 96-Core Processor".into(),
            cores: 8,
            memory_bytes: 32 << 30,
            system: "Linux x86_64".into(),
            gpu: None,
        };
        let config = "model = \"resnet20\"\ndata = \"cifar10:data/cifar-10-batches-bin\"\nbatch = 128\nepochs = 10\nseed = 7\n\n\
                      [optimizer]\nname = \"nesterov\"\nmomentum = 0.9\nweight_decay = 5e-4\n\n\
                      [schedule]\nname = \"cosine\"\nlearning_rate = 0.1\nwarm_up_steps = 390\n\n\
                      [augment]\ncrop_padding = 4\nflip = true\n";
        self.push(Event::RunStarted {
            schema: SCHEMA_VERSION,
            version: "0.1.0".into(),
            unix_s,
            model: "resnet20".into(),
            data: "cifar10:data/cifar-10-batches-bin".into(),
            parameters: 272_474,
            resumed_step,
            steps_total: self.total,
            host,
            config: config.into(),
        });
        if resumed_step > 0 {
            self.push(Event::Warning {
                message: "the last process left no end in the log; 210 steps are done again".into(),
            });
        }
    }

    fn train(&mut self, first: u64, last: u64) {
        for step in first..=last {
            self.step(step);
            if step.is_multiple_of(EPOCH_STEPS) {
                self.epoch(step);
            }
        }
    }

    fn step(&mut self, step: u64) {
        let progress = step as f64 / self.total as f64;
        let noise = f64::from(self.random.normal());
        let loss = (0.22 + 2.1 * (-5.0 * progress).exp() - 0.12 * progress) * (1.0 + 0.11 * noise);
        let is_slow = (0.55..0.62).contains(&progress);
        let data = if is_slow { 0.055 } else { 0.004 } * (1.0 + 0.3 * f64::from(self.random.uniform()));
        let compute = 0.118 * (1.0 + 0.02 * f64::from(self.random.normal())) + if step == 1 { 0.4 } else { 0.0 };
        let passes = [(Phase::Forward, 0.35 * compute), (Phase::Backward, 0.65 * compute)];
        let phases = [(Phase::Data, data), (Phase::Update, 0.0061)].into_iter().chain(passes).collect();
        let seconds = data + compute + 0.0061 + 0.0008;
        self.time_s += seconds;
        let warm_up = (step as f64 / EPOCH_STEPS as f64).min(1.0);
        self.push(Event::Step {
            step,
            epoch: (step - 1) / EPOCH_STEPS,
            loss,
            accuracy: (1.0 - 0.36 * loss + 0.025 * noise).clamp(0.05, 1.0),
            learning_rate: 0.1 * warm_up * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            samples: 128,
            portion: None,
            seconds,
            phases,
        });
        if is_slow && step.is_multiple_of(40) {
            self.push(Event::Warning {
                message: "training waited for data: the loader is slower than the steps".into(),
            });
        }
    }

    fn epoch(&mut self, step: u64) {
        let progress = step as f64 / self.total as f64;
        let loss = 0.22 + 2.1 * (-5.0 * progress).exp() - 0.12 * progress;
        let wobble = 0.02 * f64::from(self.random.normal()) * (1.0 - progress);
        let top1 = (0.925 - 0.62 * (-4.6 * progress).exp() + wobble).clamp(0.1, 1.0);
        let epoch = step / EPOCH_STEPS - 1;
        self.time_s += 4.2;
        self.push(Event::Epoch {
            epoch,
            step,
            train_loss: loss * 1.04,
            train_accuracy: 1.0 - 0.36 * loss,
            val_loss: Some(loss + 0.13),
            val_top1: Some(top1),
            val_top5: Some((0.999 - 0.2 * (-6.0 * progress).exp()).min(1.0)),
            seconds: 51.3,
            samples_per_s: 973.4,
            data_wait_s: 1.9,
        });
        self.push(Event::Checkpoint {
            step,
            path: format!("checkpoints/step-{step:08}"),
            best: epoch != 6,
            seconds: 0.031,
        });
    }
}
