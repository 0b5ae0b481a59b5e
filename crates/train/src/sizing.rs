//! Fits a model to a data set: which size the images get, and what is said when the two do not go together.

use paceline_data::dataset::{Info, SampleKind, Source};
use paceline_data::own::Treatment;
use paceline_nn::Input;
use paceline_nn::models::Named;

use crate::error::TrainError;

/// The input a model will see, and a sentence if the images are resized for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizing {
    /// The model's input.
    pub input: Input,
    /// The side to which the data pipeline brings images, if it is not their own.
    pub resize: Option<usize>,
    /// What the user should know.
    pub note: Option<String>,
}

impl Sizing {
    /// Refuses to resize what cannot be.
    ///
    /// # Errors
    /// When the samples are numbers of a program's own.
    pub fn check(&self, model: &str, info: &Info) -> Result<(), TrainError> {
        match (self.resize, info.source) {
            (Some(side), Source::Own(Treatment { numbers: true, .. })) => Err(TrainError::Refused(format!(
                "{model} would see {}'s samples at {side}×{side}, and those are numbers, which are not resized; leave --size out, or take \
                 a model for their size",
                info.name
            ))),
            _ => Ok(()),
        }
    }
}

/// Chooses the input of a model for a data set.
///
/// # Errors
/// When the model reads another kind of sample, or the size asked for is too small.
pub fn fit(model: &Named<'_>, info: &Info, asked: Option<usize>) -> Result<Sizing, TrainError> {
    if model.is_own() { Ok(as_they_are(info, asked)) } else { for_entry(model, info, asked) }
}

/// The input of a model that nothing is known of: the data's samples as they are, or at the size asked for.
pub fn as_they_are(info: &Info, asked: Option<usize>) -> Sizing {
    let input = match info.kind {
        SampleKind::Tokens { sequence } => Input::Tokens { sequence },
        SampleKind::Image { height, width, channels } => {
            image(asked.map_or([height, width], |side| [side; 2]), channels)
        }
    };
    let resize = asked.filter(|_| matches!(info.kind, SampleKind::Image { .. }));
    Sizing { input, resize, note: None }
}

fn for_entry(entry: &Named<'_>, info: &Info, asked: Option<usize>) -> Result<Sizing, TrainError> {
    let (name, smallest) = (entry.name, entry.smallest);
    match (info.kind, entry.native) {
        (SampleKind::Tokens { sequence }, Input::Tokens { .. }) => {
            Ok(Sizing { input: Input::Tokens { sequence }, resize: None, note: None })
        }
        (SampleKind::Tokens { .. }, Input::Image { .. }) => Err(TrainError::Refused(format!(
            "{name} reads images and {} is text; type --model lstm or --model gpt",
            info.name
        ))),
        (SampleKind::Image { .. }, Input::Tokens { .. }) => {
            Err(TrainError::Refused(format!("{name} reads text and {} has images; type --data text:FILE", info.name)))
        }
        (SampleKind::Image { height, width, channels }, Input::Image { size: native, .. }) => {
            if let Some(side) = asked {
                if side < smallest {
                    return Err(TrainError::Refused(format!(
                        "{name} cannot work on {side}×{side} images, its arithmetic needs at least {smallest}×{smallest}; type --size {smallest} or more"
                    )));
                }
                return Ok(Sizing { input: image([side, side], channels), resize: Some(side), note: None });
            }
            if info.source == Source::Folder {
                let note = format!(
                    "images are cropped and scaled to {}×{}, {name}'s own size (--size to change)",
                    native[0], native[1]
                );
                return Ok(Sizing { input: image(native, channels), resize: Some(native[0]), note: Some(note) });
            }
            if height.min(width) < smallest {
                let note = format!(
                    "images of {width}×{height} are resized to {smallest}×{smallest}, the least that {name} works on (--size to change)"
                );
                return Ok(Sizing { input: image([smallest; 2], channels), resize: Some(smallest), note: Some(note) });
            }
            Ok(Sizing { input: image([height, width], channels), resize: None, note: None })
        }
    }
}

fn image(size: [usize; 2], channels: usize) -> Input {
    Input::Image { size, channels }
}
