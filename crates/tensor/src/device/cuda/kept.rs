//! Opens a GPU with what was found out about its kind before: which engines its convolutions use, in a file of a cache folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_system::disk::Disk;

use super::{Cuda, CudaError, Engines, Options};

/// A GPU, and the file that keeps its engines.
#[derive(Debug)]
pub struct Kept {
    /// The device.
    pub cuda: Arc<Cuda>,
    /// What is wrong with the file, if anything: it is not used then.
    pub warning: Option<String>,
    file: Option<PathBuf>,
    known: usize,
    disk: Disk,
}

impl Kept {
    /// Opens GPU `number`; engines are kept in `folder`, if there is one.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn open(disk: &Disk, folder: Option<&Path>, number: usize, options: Options) -> Result<Self, CudaError> {
        let cuda = Arc::new(Cuda::new(number, options)?);
        let file = folder.map(|folder| Ok::<_, CudaError>(folder.join(name(&cuda)?))).transpose()?;
        let mut warning = None;
        if let Some(file) = file.as_ref().filter(|file| disk.exists(file)) {
            let read = disk.read(file).map_err(|error| error.to_string());
            match read.and_then(|bytes| read_engines(&bytes)) {
                Ok(engines) => cuda.adopt(engines),
                Err(error) => warning = Some(format!("{} is not used: {error}", file.display())),
            }
        }
        let known = cuda.engines().len();
        Ok(Self { cuda, warning, file, known, disk: disk.clone() })
    }

    /// Keeps what was found out since; how many engines that are.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn keep(&self) -> Result<usize, CudaError> {
        let engines = self.cuda.engines();
        let new = engines.len() - self.known.min(engines.len());
        let Some(file) = self.file.as_ref().filter(|_| new > 0) else { return Ok(new) };
        let text = write_engines(&engines);
        let folder = file.parent().map_or(Ok(()), |folder| self.disk.create_dir(folder));
        folder.and_then(|()| self.disk.write(file, &text)).map_err(|error| CudaError(error.to_string()))?;
        Ok(new)
    }
}

/// Engines from the bytes of a file.
///
/// # Errors
/// When they are not such a file.
pub fn read_engines(bytes: &[u8]) -> Result<Engines, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// The bytes of a file of engines.
pub fn write_engines(engines: &Engines) -> Vec<u8> {
    serde_json::to_vec_pretty(engines).expect("plain data becomes JSON")
}

/// The file of a kind of GPU, driver and library: engines of one may not exist in another.
fn name(cuda: &Cuda) -> Result<String, CudaError> {
    let (what, options) = (cuda.describe()?, cuda.options());
    let plain: String = what.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let marks =
        format!("{}{}", if options.tf32 { "-tf32" } else { "" }, if options.deterministic { "-same" } else { "" });
    Ok(format!("cudnn-{}-{}-{}{marks}.json", plain.to_lowercase(), what.driver_version, what.cudnn_version))
}
