//! Opens a GPU, and keeps which engines its convolutions use from one command to the next, beside the CPU's choices.

use std::path::PathBuf;
use std::sync::Arc;

use paceline::system::disk::Disk;
use paceline::tensor::device::cuda::{Cuda, Engines, Options};

use super::calibrate::{Calibrate, folder};
use crate::failure::Failure;

/// A GPU with what is known of it.
pub struct Gpu {
    /// The device.
    pub cuda: Arc<Cuda>,
    file: Option<PathBuf>,
    known: usize,
}

/// Opens GPU `number`.
pub fn open(number: usize, options: Options, calibrate: Calibrate) -> Result<Gpu, Failure> {
    let options = Options { tune: calibrate == Calibrate::On, ..options };
    let cuda = Arc::new(Cuda::new(number, options).map_err(Failure::refused)?);
    let what = cuda.describe().map_err(Failure::refused)?;
    let plain: String = what.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let file = folder().map(|folder| {
        folder.join(format!(
            "cudnn-{}-{}-{}{}.json",
            plain.to_lowercase(),
            what.driver_version,
            what.cudnn_version,
            if options.tf32 { "-tf32" } else { "" }
        ))
    });
    if calibrate != Calibrate::Off
        && let Some(file) = file.as_ref().filter(|file| Disk::real().exists(file))
    {
        let read = Disk::real().read(file).map_err(|error| error.to_string());
        match read.and_then(|bytes| serde_json::from_slice::<Engines>(&bytes).map_err(|error| error.to_string())) {
            Ok(engines) => cuda.adopt(engines),
            Err(error) => eprintln!("warning: {} is not used: {error}", file.display()),
        }
    }
    let known = cuda.engines().len();
    Ok(Gpu { cuda, file, known })
}

impl Gpu {
    /// Keeps what was found out since.
    pub fn keep(&self) {
        let engines = self.cuda.engines();
        let Some(file) = self.file.as_ref().filter(|_| engines.len() > self.known) else { return };
        eprintln!("chose the engines of {} convolution passes", engines.len() - self.known);
        let text = serde_json::to_vec_pretty(&engines).expect("plain data becomes JSON");
        let kept = file.parent().map_or(Ok(()), |folder| Disk::real().create_dir(folder));
        if let Err(error) = kept.and_then(|()| Disk::real().write(file, &text)) {
            eprintln!("warning: what was chosen is not kept: {error}");
        }
    }
}
