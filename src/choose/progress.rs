//! The bar of a search: how much of its time is over, and what is measured.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::Style;

/// A bar, where somebody looks.
pub struct Progress(Option<ProgressBar>);

impl Progress {
    /// Of so many seconds.
    pub fn new(style: Style, seconds: f64) -> Self {
        let bar = || {
            let style = ProgressStyle::with_template("choosing {bar:28.cyan/dim} {pos}/{len} s  {spinner} {msg}")
                .expect("the template is valid");
            let bar = ProgressBar::new(seconds.ceil() as u64).with_style(style.progress_chars("━╸─"));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        };
        Self((style == Style::Bar).then(bar))
    }

    /// So many seconds are over, and this is measured now.
    pub fn at(&self, seconds: f64, what: &str) {
        if let Some(bar) = &self.0 {
            bar.set_position(seconds as u64);
            bar.set_message(what.to_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
