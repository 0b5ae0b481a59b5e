//! A batch: what one rank feeds to one step, as plain slices. Buffers are filled again and again; see [`crate::loader`].

use paceline_system::memory;

use crate::DataError;
use crate::augment::{Augment, SampleKey, Scratch, View};
use crate::dataset::{Dataset, SampleKind};
use crate::order::{Portion, Share};

/// Samples laid out for the engine. Of `images`, `views` and `tokens` one is filled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Images: sample × height × width × channels, normalised.
    pub images: Vec<f32>,
    /// How to look at images that the device has.
    pub views: Vec<View>,
    /// Token sequences: sample × position.
    pub tokens: Vec<i32>,
    /// Classes, one per image; or the next token, one per token.
    pub targets: Vec<i32>,
    /// Which samples of the set these are, as ordered. A damaged image's number stays although another took its place.
    pub samples: Vec<usize>,
    /// How many samples; at the end of an epoch fewer, or none.
    pub size: usize,
    /// Which part of the batch of all ranks this is; if nobody says, all have as many.
    pub share: Option<Share>,
    /// Which portion of which step it is, where portions are handed out.
    pub portion: Option<Portion>,
}

/// All that decides a batch's numbers, the choice of samples apart.
#[derive(Clone, Copy, Debug)]
pub struct Recipe<'a> {
    /// Where samples come from.
    pub dataset: &'a Dataset,
    /// What happens to images.
    pub augment: &'a Augment,
    /// The run's seed.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// Whether the device has the images, so that it is only said how to look at them.
    pub views: bool,
}

impl Batch {
    /// Fills the batch with `samples`, made by `recipe`.
    ///
    /// # Errors
    /// When a file cannot be read or too many are damaged.
    pub fn fill(&mut self, recipe: &Recipe, samples: &[u32], scratch: &mut Scratch) -> Result<(), DataError> {
        let Recipe { dataset, augment, seed, epoch, views } = *recipe;
        self.views.clear();
        (self.share, self.portion) = (None, None);
        self.size = samples.len();
        self.samples.clear();
        self.samples.extend(samples.iter().map(|&sample| sample as usize));
        match dataset.info().kind {
            SampleKind::Tokens { sequence } => {
                self.images.clear();
                let length = self.size * sequence;
                memory::reserve(&mut self.tokens, length, "a batch")?;
                memory::reserve(&mut self.targets, length, "a batch")?;
                self.tokens.resize(length, 0);
                self.targets.resize(length, 0);
                let rows = self.tokens.chunks_exact_mut(sequence).zip(self.targets.chunks_exact_mut(sequence));
                for ((tokens, targets), &sample) in rows.zip(&self.samples) {
                    dataset.read_tokens(sample, tokens, targets)?;
                }
            }
            SampleKind::Image { height, width, .. } if views => {
                self.images.clear();
                self.tokens.clear();
                self.targets.clear();
                self.targets
                    .extend(self.samples.iter().map(|&sample| dataset.label(sample).expect("an image has a class")));
                let view = |&sample: &usize| augment.view([height, width], SampleKey { seed, epoch, sample });
                self.views.extend(self.samples.iter().map(view));
            }
            kind @ SampleKind::Image { .. } => {
                let length: usize = augment.output(kind).expect("images give images").iter().product();
                self.tokens.clear();
                memory::reserve(&mut self.images, self.size * length, "a batch")?;
                self.images.resize(self.size * length, 0.0);
                self.targets.resize(self.size, 0);
                for (at, &sample) in self.samples.iter().enumerate() {
                    let out = &mut self.images[at * length..(at + 1) * length];
                    if let Dataset::Own(own) = dataset
                        && own.holds_numbers()
                    {
                        self.targets[at] = own.read_values(sample, out)?;
                        augment.normalise(out);
                        continue;
                    }
                    self.targets[at] = dataset.read_image(sample, &mut scratch.image)?;
                    augment.apply(scratch, SampleKey { seed, epoch, sample }, out);
                }
            }
        }
        Ok(())
    }
}
