//! What a GPU is doing, by the vendor's NVML: how busy it is, its memory, power and temperature. `train` asks once a second, beside the
//! steps and never in them; `paceline doctor` asks once.
//!
//! Three layers, as for the other libraries: functions looked up by name (raw), answers that may be missing (checked), [`Monitor`]
//! (safe). Which library knows a GPU by which number differs, so a GPU is found by its place on the bus.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use paceline_system::event::GpuUse;

use super::library;

type Device = *mut c_void;

/// Percent of the last second in which a kernel ran, and in which memory was read or written.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Utilisation {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// The sensor on the chip itself.
const CHIP: c_int = 0;

/// The functions that are used; each returns 0 when it went well.
struct Raw {
    init: unsafe extern "C" fn() -> c_int,
    shutdown: unsafe extern "C" fn() -> c_int,
    device: unsafe extern "C" fn(*const c_char, *mut Device) -> c_int,
    utilisation: unsafe extern "C" fn(Device, *mut Utilisation) -> c_int,
    memory: unsafe extern "C" fn(Device, *mut MemoryInfo) -> c_int,
    power: unsafe extern "C" fn(Device, *mut c_uint) -> c_int,
    temperature: unsafe extern "C" fn(Device, c_int, *mut c_uint) -> c_int,
    /// Keeps the functions where they are.
    _library: libloading::Library,
}

impl Raw {
    fn load() -> Option<Self> {
        let library = library::NVML.open().ok()?;
        // SAFETY: the functions have these signatures in every NVML that has them: they are part of its stable interface.
        unsafe {
            Some(Self {
                init: *library.get(b"nvmlInit_v2").ok()?,
                shutdown: *library.get(b"nvmlShutdown").ok()?,
                device: *library.get(b"nvmlDeviceGetHandleByPciBusId_v2").ok()?,
                utilisation: *library.get(b"nvmlDeviceGetUtilizationRates").ok()?,
                memory: *library.get(b"nvmlDeviceGetMemoryInfo").ok()?,
                power: *library.get(b"nvmlDeviceGetPowerUsage").ok()?,
                temperature: *library.get(b"nvmlDeviceGetTemperature").ok()?,
                _library: library,
            })
        }
    }
}

/// What NVML answered, in its own units; none where it did not.
#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    utilisation: Option<Utilisation>,
    memory: Option<MemoryInfo>,
    milliwatts: Option<c_uint>,
    celsius: Option<c_uint>,
}

/// Watches one GPU.
pub struct Monitor {
    raw: Raw,
    device: Device,
}

// SAFETY: NVML may be called from any thread.
unsafe impl Send for Monitor {}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Monitor")
    }
}

impl Monitor {
    /// Watches the GPU at this place on the bus. None where there is no NVML, or it does not know the GPU: whoever asks goes without.
    pub fn open(bus: &str) -> Option<Self> {
        let (raw, bus, mut device) = (Raw::load()?, CString::new(bus).ok()?, null_mut());
        // SAFETY: takes nothing; undone by `drop`, or below.
        if unsafe { (raw.init)() } != 0 {
            return None;
        }
        // SAFETY: NVML has begun, the text ends with a zero, and one handle is written.
        if unsafe { (raw.device)(bus.as_ptr(), &mut device) } != 0 {
            // SAFETY: begun above, and nothing of it is held.
            unsafe { (raw.shutdown)() };
            return None;
        }
        Some(Self { raw, device })
    }

    /// What the GPU is doing now.
    pub fn look(&self) -> GpuUse {
        let (mut utilisation, mut memory) = (Utilisation::default(), MemoryInfo::default());
        let (mut milliwatts, mut celsius) = (0, 0);
        // SAFETY: NVML has begun and the handle is its own; each call writes one value of the type it is given.
        let answers = unsafe {
            Answers {
                utilisation: ((self.raw.utilisation)(self.device, &mut utilisation) == 0).then_some(utilisation),
                memory: ((self.raw.memory)(self.device, &mut memory) == 0).then_some(memory),
                milliwatts: ((self.raw.power)(self.device, &mut milliwatts) == 0).then_some(milliwatts),
                celsius: ((self.raw.temperature)(self.device, CHIP, &mut celsius) == 0).then_some(celsius),
            }
        };
        answers.read()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // SAFETY: begun once in `open`; nothing of NVML is used after this.
        unsafe { (self.raw.shutdown)() };
    }
}

impl Answers {
    /// In the units of events; what cannot be is left out.
    fn read(self) -> GpuUse {
        let memory = self.memory.filter(|memory| memory.total > 0 && memory.used <= memory.total);
        GpuUse {
            busy: self.utilisation.filter(|all| all.gpu <= 100).map(|all| f64::from(all.gpu) / 100.0),
            memory_used_bytes: memory.map(|memory| memory.used),
            memory_bytes: memory.map(|memory| memory.total),
            power_w: self.milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3),
            temperature_c: self.celsius.filter(|&celsius| celsius < 1000).map(f64::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_in_the_units_of_events() {
        let answers = Answers {
            utilisation: Some(Utilisation { gpu: 97, memory: 61 }),
            memory: Some(MemoryInfo { total: 150 << 30, free: 140 << 30, used: 10 << 30 }),
            milliwatts: Some(512_250),
            celsius: Some(64),
        };
        let seen = GpuUse {
            busy: Some(0.97),
            memory_used_bytes: Some(10 << 30),
            memory_bytes: Some(150 << 30),
            power_w: Some(512.25),
            temperature_c: Some(64.0),
        };
        assert_eq!(answers.read(), seen);
    }

    #[test]
    fn what_is_not_answered_or_cannot_be_is_left_out() {
        assert_eq!(Answers::default().read(), GpuUse::default());
        let nonsense = Answers {
            utilisation: Some(Utilisation { gpu: u32::MAX, memory: 0 }),
            memory: Some(MemoryInfo { total: 0, free: 0, used: 0 }),
            milliwatts: None,
            celsius: Some(u32::MAX),
        };
        assert_eq!(nonsense.read(), GpuUse::default());
    }

    #[test]
    fn a_gpu_that_is_not_there_is_not_watched() {
        assert!(Monitor::open("ffffffff:ff:ff.0").is_none());
        assert!(Monitor::open("a\0b").is_none());
    }
}
