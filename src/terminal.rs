//! What a person at a terminal sees of a run: a bar per epoch, or plain lines where output is piped, or JSON, or nothing.
//!
//! A listener to events like any other; it knows nothing that the event log does not.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use crate::lab::SummaryBuilder;
use crate::nn::Input;
use crate::system::event::{Event, Line};
use crate::system::printable::{Shown, printable};
use crate::system::shell::resume_line;
use crate::train::trainer::Observer;
use crate::train::{Outcome, Reason, Trainer};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{grouped, note, print, print_json};

/// How much is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A moving bar.
    Bar,
    /// A line per epoch.
    Plain,
    /// Every event as JSON.
    Json,
    /// Nothing.
    Quiet,
}

impl Style {
    /// By flags, and by whether somebody looks.
    pub fn choose(quiet: bool, json: bool) -> Self {
        match (quiet, json, std::io::stderr().is_terminal() && std::io::stdout().is_terminal()) {
            (true, ..) => Self::Quiet,
            (_, true, _) => Self::Json,
            (_, _, true) => Self::Bar,
            _ => Self::Plain,
        }
    }
}

/// Where other threads say something to people: on standard error, above the bar while there is one.
#[derive(Clone, Default)]
pub struct Notes(Arc<Mutex<Option<ProgressBar>>>);

impl Notes {
    /// Says it.
    pub fn say(&self, text: &str) {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    fn stay_above(&self, bar: Option<ProgressBar>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bar;
    }
}

/// The display of one run.
#[derive(Clone)]
pub struct Terminal(Rc<RefCell<Display>>);

struct Display {
    style: Style,
    notes: Notes,
    bar: Option<ProgressBar>,
    epochs: u64,
    steps_per_epoch: u64,
    batch: usize,
    /// How many workers, or replicas in one process, with how many compute threads each.
    ranks: String,
    run: String,
    unit: &'static str,
    /// The current epoch's sums, for the bar.
    samples: u64,
    seconds: f64,
    loss: f64,
    right: f64,
    summary: SummaryBuilder,
}

impl Terminal {
    /// A display for a run that is about to start.
    pub fn new(style: Style, trainer: &Trainer, notes: Notes) -> Self {
        let config = trainer.config();
        let (workers, threads) = (trainer.replica().world(), trainer.replica().device().pool().threads());
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let rank = if config.has_rank_threads() { "replica" } else { "worker" };
        Self(Rc::new(RefCell::new(Display {
            style,
            notes,
            bar: None,
            epochs: config.epochs,
            steps_per_epoch: trainer.steps_per_epoch(),
            batch: config.batch,
            ranks: format!("{} × {}", many(workers, rank), many(threads, "thread")),
            run: Shown(trainer.run_dir().path()).to_string(),
            unit: match trainer.replica().options().input {
                Input::Tokens { .. } => "sequences/s",
                Input::Image { .. } => "images/s",
            },
            samples: 0,
            seconds: 0.0,
            loss: 0.0,
            right: 0.0,
            summary: SummaryBuilder::new(),
        })))
    }

    /// The listener to hand to the trainer.
    pub fn observer(&self) -> Observer {
        let display = Rc::clone(&self.0);
        Box::new(move |line| {
            display.borrow_mut().show(line);
            Ok(())
        })
    }

    /// Takes the bar away.
    pub fn close(&self) {
        let mut display = self.0.borrow_mut();
        display.notes.stay_above(None);
        if let Some(bar) = display.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// The last words of a run that ended well.
    pub fn finish(&self, outcome: &Outcome, report: Option<&Path>) {
        let display = self.0.borrow();
        if matches!(display.style, Style::Json | Style::Quiet) {
            return;
        }
        let summary = display.summary.finish();
        let mut words = vec![match outcome.reason {
            Reason::Done => "done".to_owned(),
            Reason::EarlyStop => "stopped early: the accuracy no longer rose".to_owned(),
            Reason::MaxSteps => format!("stopped at step {} as asked", outcome.step),
            Reason::TimeLimit => "stopped: the time is over".to_owned(),
            Reason::Interrupted => format!("interrupted at step {}, saved", outcome.step),
        }];
        if let Some(top1) = summary.final_top1 {
            let best = summary.best.filter(|best| best.top1 > top1);
            let best = best
                .map_or(String::new(), |best| format!(" (best {:.2}% in epoch {})", 100.0 * best.top1, best.epoch + 1));
            words.push(format!("accuracy {:.2}%{best}", 100.0 * top1));
        }
        if let Some(rate) = summary.samples_per_s {
            words.push(format!("{rate:.0} {}", display.unit));
        }
        words.push(format!("{:.1} s", summary.seconds));
        let mut text = format!("{}\n", words.join(", "));
        if let Some(report) = report {
            text += &format!("report  {}\n", Shown(report));
        }
        let line = resume_line(&outcome.run);
        text += &match outcome.reason {
            Reason::Done | Reason::EarlyStop => String::new(),
            Reason::MaxSteps => format!("resume  {line} --max-steps {}\n", 2 * outcome.step),
            Reason::TimeLimit | Reason::Interrupted => format!("resume  {line}\n"),
        };
        print(&text);
    }
}

impl Display {
    fn show(&mut self, line: &Line) {
        match self.style {
            Style::Quiet => {}
            Style::Json => print_json(line),
            Style::Bar | Style::Plain => self.show_to_people(line),
        }
        self.summary.push(line);
    }

    fn show_to_people(&mut self, line: &Line) {
        match &line.event {
            Event::RunStarted { model, data, parameters, resumed_step, .. } => {
                let resumed =
                    if *resumed_step > 0 { format!(", resumed at step {resumed_step}") } else { String::new() };
                let (parameters, batch) = (grouped(*parameters), self.batch);
                let length = format!("{} epochs of {} steps", self.epochs, self.steps_per_epoch);
                self.say(&format!(
                    "{} ({parameters} parameters) on {}, batch {batch}, {length}, {}{resumed}",
                    printable(model),
                    printable(data),
                    self.ranks
                ));
                self.say(&format!("run     {}", self.run));
            }
            Event::Step { step, epoch, loss, accuracy, samples, seconds, .. } => {
                self.samples += samples;
                self.seconds += seconds;
                self.loss += loss * *samples as f64;
                self.right += accuracy * *samples as f64;
                if self.style == Style::Bar {
                    self.move_bar(*step, *epoch);
                }
            }
            Event::Epoch { epoch, .. } => {
                let epoch = *epoch;
                self.show_epoch(epoch, &line.event);
            }
            Event::Evaluated { step, val_loss, val_top1, val_top5, .. } => self.say(&format!(
                "Step {step}  val_loss: {val_loss:.4}  val_accuracy: {val_top1:.4}  val_top5: {val_top5:.4}"
            )),
            Event::Pipeline { schedule, micro_batches, stages, speedup, bound, .. } => self.say(&format!(
                "stages  {} by {schedule}, {micro_batches} micro-batches; expected {speedup:.2}× one device, at most {bound:.2}×",
                stages.len()
            )),
            Event::Parts { split, parts } => self.say(&format!(
                "parts   {}, by {split}; each sends up to {:.1} MB a step, in {} exchanges",
                parts.len(),
                parts.iter().map(|part| part.sent_bytes).max().unwrap_or(0) as f64 / 1e6,
                parts.first().map_or(0, |part| part.exchanges)
            )),
            Event::Balanced { samples, .. } => {
                let shares: Vec<String> = samples.iter().map(u64::to_string).collect();
                self.say(&format!("balance {} samples of a batch by the workers' speed", shares.join(" + ")));
            }
            Event::Warning { message } => self.say(&format!("note    {message}")),
            // The launcher has said it; and who is late, lost or back was said when it was.
            Event::Restarted { .. }
            | Event::Checkpoint { .. }
            | Event::Gpu(_)
            | Event::Served { .. }
            | Event::Late { .. }
            | Event::CaughtUp { .. }
            | Event::Lost { .. }
            | Event::Returned { .. }
            | Event::RunFinished { .. } => {}
        }
    }

    fn show_epoch(&mut self, epoch: u64, event: &Event) {
        let Event::Epoch {
            train_loss,
            train_accuracy,
            val_loss,
            val_top1,
            val_top5,
            seconds,
            samples_per_s,
            data_wait_s,
            ..
        } = event
        else {
            return;
        };
        let steps = self.steps_per_epoch;
        let mut text = format!(
            "Epoch {}/{}  {steps}/{steps}  {seconds:.1}s  {samples_per_s:.0} {}  loss: {train_loss:.4}  accuracy: {train_accuracy:.4}",
            epoch + 1,
            self.epochs,
            self.unit
        );
        if let (Some(loss), Some(top1), Some(top5)) = (val_loss, val_top1, val_top5) {
            text += &format!("  val_loss: {loss:.4}  val_accuracy: {top1:.4}  val_top5: {top5:.4}");
        }
        // Below a twentieth nobody would want to know.
        if *data_wait_s > 0.05 * seconds {
            text += &format!("  (waited {data_wait_s:.1}s for data)");
        }
        self.say(&text);
        (self.samples, self.seconds, self.loss, self.right) = (0, 0.0, 0.0, 0.0);
    }

    fn move_bar(&mut self, step: u64, epoch: u64) {
        let (epochs, steps) = (self.epochs, self.steps_per_epoch);
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("{prefix} {bar:28.cyan/dim} {pos}/{len} {msg} eta {eta}")
                .expect("the template is valid");
            let bar = ProgressBar::new(steps).with_style(style.progress_chars("━╸─"));
            self.notes.stay_above(Some(bar.clone()));
            bar
        });
        let in_epoch = step - epoch * steps;
        if in_epoch == 1 || bar.position() > in_epoch {
            bar.reset();
        }
        bar.set_prefix(format!("Epoch {}/{epochs}", epoch + 1));
        let rate = self.samples as f64 / self.seconds.max(1e-9);
        let (loss, accuracy) = (self.loss / self.samples as f64, self.right / self.samples as f64);
        bar.set_message(format!("{rate:.0} {}  loss {loss:.4}  accuracy {accuracy:.4} ", self.unit));
        bar.set_position(in_epoch);
    }

    /// A line for people; above the bar if there is one.
    fn say(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| print(&format!("{text}\n"))),
            None => print(&format!("{text}\n")),
        }
    }
}
