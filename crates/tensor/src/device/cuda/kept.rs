//! Opens a GPU with what was found out about its kind before, in files of a cache folder: which engines its convolutions use, and the machine
//! code of our kernels, which take seconds to compile.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_system::disk::Disk;

use super::{Cuda, CudaError, Engines, Options, compile};

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
    /// Opens GPU `number`; engines and machine code are kept in `folder`, if there is one.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn open(disk: &Disk, folder: Option<&Path>, number: usize, options: Options) -> Result<Self, CudaError> {
        let cuda = Arc::new(match folder {
            Some(folder) => Cuda::with_code(number, options, |capability| {
                kept_code(disk, folder, (capability, &compile::recipe()), || compile::kernels(capability))
            })?,
            None => Cuda::new(number, options)?,
        });
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

/// The kernels' machine code for a compute capability: what was kept of this very recipe, if it is whole, or made now and kept. That it
/// cannot be kept is no reason not to compute.
fn kept_code(
    disk: &Disk,
    folder: &Path,
    ((major, minor), recipe): ((i32, i32), &[u8]),
    make: impl FnOnce() -> Result<Vec<u8>, CudaError>,
) -> Result<Vec<u8>, CudaError> {
    let file = folder.join(format!("kernels-sm{major}{minor}-{:08x}.bin", crc32c::crc32c(recipe)));
    let whole = |mut bytes: Vec<u8>| {
        let sum = bytes.split_off(bytes.len().checked_sub(4)?);
        let is_code = bytes.starts_with(b"\x7fELF") && crc32c::crc32c(&bytes).to_le_bytes()[..] == sum[..];
        is_code.then_some(bytes)
    };
    if disk.exists(&file)
        && let Some(code) = disk.read(&file).ok().and_then(whole)
    {
        return Ok(code);
    }
    let code = make()?;
    let kept = [&code[..], &crc32c::crc32c(&code).to_le_bytes()].concat();
    let _ = disk.create_dir(folder).and_then(|()| disk.write(&file, &kept));
    Ok(code)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_is_made_once_and_again_where_the_file_is_damaged() {
        let (folder, disk) = (tempfile::tempdir().unwrap(), Disk::real());
        let cache = folder.path().join("cache");
        let code = |made: Result<Vec<u8>, CudaError>| kept_code(&disk, &cache, ((9, 0), b"recipe"), || made);
        let none = || Err(CudaError("made again".into()));
        let whole = || b"\x7fELF and so on".to_vec();
        assert_eq!(code(none()), none(), "what cannot be made is not kept");
        assert_eq!(code(Ok(whole())), Ok(whole()));
        assert_eq!(code(none()), Ok(whole()), "it was kept");
        assert_eq!(kept_code(&disk, &cache, ((8, 0), b"recipe"), none), none(), "for one kind of GPU");
        assert_eq!(kept_code(&disk, &cache, ((9, 0), b"other"), none), none(), "of one recipe");
        let file = disk.list(&cache).unwrap().remove(0);
        for damaged in [vec![], vec![1, 2], vec![0; 4], [&whole()[..], &[0; 4]].concat()] {
            disk.write(&file, &damaged).unwrap();
            assert_eq!(code(none()), none(), "{damaged:?}");
        }
    }
}
