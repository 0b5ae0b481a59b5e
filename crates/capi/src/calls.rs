//! The functions of `include/paceline.h`, which says what each does. Here pointers become references and lengths become
//! slices; what is done with them is in `boxes.rs`.
//!
//! A pointer that may be null is an `Option` of a reference or of a box, which has the same bits. What is written through one
//! is `MaybeUninit`: a variable in C has no value before.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use paceline_comm::memory_box;

use crate::boxes::{Birth, Boxes, Region, Secret, Way};
use crate::problem::{self, Problem, Status, call};

/// `struct paceline_box`.
type Handle = Arc<Boxes>;

/// Where a result goes.
type Room<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// `struct paceline_options`.
#[repr(C)]
pub struct Options {
    token: *const c_char,
    token_file: *const c_char,
    sockets: u32,
    tls: u8,
    unmapped: u8,
}

/// `struct paceline_key`.
#[repr(C)]
pub struct Key {
    name: [u8; 32],
    secret: [u8; 16],
}

/// `struct paceline_usage_info`.
#[repr(C)]
pub struct Usage {
    regions: u64,
    clients: u64,
    used: u64,
    bytes_max: u64,
}

// As tests/box.c asserts of the header.
const _: () = assert!(size_of::<Key>() == 48 && size_of::<Usage>() == 32);
const _: () = assert!(size_of::<Options>() == 2 * size_of::<*const c_char>() + 8);

fn given<T>(pointer: Option<T>, what: &str) -> Result<T, Problem> {
    pointer.ok_or_else(|| Problem::invalid(format!("{what} is NULL")))
}

/// Text of C.
///
/// # Safety
/// `text` is null, or points to bytes that end with a zero and stay as they are for `'a`.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Problem> {
    if text.is_null() {
        return given(None, what);
    }
    // SAFETY: it is not null, and the caller says that a zero ends it and that it stays.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Problem::invalid(format!("{what} is not UTF-8")))
}

/// How many values so many are, if they can be somewhere in memory, from this place on.
fn length<T>(start: *const T, count: u64, what: &str) -> Result<usize, Problem> {
    if start.is_null() {
        return given(None, what);
    }
    if !start.is_aligned() {
        return Err(Problem::invalid(format!("{what} is at no multiple of {}", align_of::<T>())));
    }
    let fits = |count: &usize| count.checked_mul(size_of::<T>()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    let count = usize::try_from(count).ok().filter(fits);
    count.ok_or_else(|| Problem::invalid(format!("{what} cannot be so long")))
}

/// Values of C that are read.
///
/// # Safety
/// `start` is null, or points to `count` values that nobody changes for `'a`.
unsafe fn values<'a, T>(start: *const T, count: u64, what: &str) -> Result<&'a [T], Problem> {
    let count = length(start, count, what)?;
    // SAFETY: it is neither null nor askew nor longer than memory can be, and the caller says that the values are there and stay.
    Ok(unsafe { slice::from_raw_parts(start, count) })
}

/// Bytes of C that are written.
///
/// # Safety
/// `start` is null, or points to `count` bytes that nobody else looks at for `'a`.
unsafe fn space<'a>(start: *mut u8, count: u64, what: &str) -> Result<&'a mut [u8], Problem> {
    let count = length(start, count, what)?;
    // SAFETY: it is not null nor longer than memory can be, and the caller says that the bytes are there and nobody else's.
    Ok(unsafe { slice::from_raw_parts_mut(start, count) })
}

/// Leaves a number where it is wanted.
fn leave<T>(room: Room<'_, T>, value: T) {
    if let Some(room) = room {
        room.write(value);
    }
}

const fn known(key: &Key) -> memory_box::Key {
    memory_box::Key { name: key.name, secret: key.secret }
}

const fn lent(key: memory_box::Key) -> Key {
    Key { name: key.name, secret: key.secret }
}

#[unsafe(no_mangle)]
extern "C" fn paceline_error() -> *const c_char {
    problem::last()
}

/// # Safety
/// Strings are null or end with a zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn paceline_connect(
    addresses: *const c_char,
    options: Option<&Options>,
    boxes: Room<'_, Option<Box<Handle>>>,
) -> c_int {
    call(|| {
        let boxes = given(boxes, "where the box goes")?.write(None);
        // SAFETY: as the caller says.
        let addresses = unsafe { text(addresses, "the list of addresses") }?;
        let mut way = Way { secret: Secret::Own, sockets: 0, is_secret: false, maps: true };
        if let Some(options) = options {
            way.secret = if !options.token.is_null() {
                // SAFETY: as the caller says.
                Secret::Digits(unsafe { text(options.token, "the token") }?)
            } else if !options.token_file.is_null() {
                // SAFETY: as the caller says.
                Secret::File(unsafe { text(options.token_file, "the token file") }?)
            } else {
                Secret::Own
            };
            (way.sockets, way.is_secret, way.maps) = (options.sockets, options.tls != 0, options.unmapped == 0);
        }
        *boxes = Some(Box::new(Arc::new(Boxes::connect(addresses, &way)?)));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_close(boxes: Option<Box<Handle>>) -> c_int {
    call(|| {
        drop(boxes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_is_mapped(boxes: Option<&Handle>, is_mapped: Room<'_, c_int>) -> c_int {
    call(|| {
        given(is_mapped, "where the answer goes")?.write(given(boxes, "the box")?.is_mapped().into());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_usage(boxes: Option<&Handle>, usage: Room<'_, Usage>) -> c_int {
    call(|| {
        let room = given(usage, "where the answer goes")?;
        let memory_box::Usage { regions, clients, used, bytes_max } = given(boxes, "the box")?.usage()?;
        room.write(Usage { regions, clients, used, bytes_max });
        Ok(())
    })
}

/// # Safety
/// The name is null or ends with a zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn paceline_key_derive(boxes: Option<&Handle>, name: *const c_char, key: Room<'_, Key>) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let name = unsafe { text(name, "the name") }?;
        given(key, "where the key goes")?.write(lent(given(boxes, "the box")?.key(name)));
        Ok(())
    })
}

/// # Safety
/// The name is null or ends with a zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn paceline_key_named(name: *const c_char, secret: Option<&[u8; 16]>, key: Room<'_, Key>) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let name = unsafe { text(name, "the name") }?;
        let secret = given(secret, "the access token")?;
        given(key, "where the key goes")?.write(lent(memory_box::Key::named(name, *secret)));
        Ok(())
    })
}

fn region(
    (boxes, key): (Option<&Handle>, Option<&Key>),
    (bytes, birth): (u64, Birth),
    room: Room<'_, Option<Box<Region>>>,
) -> c_int {
    call(|| {
        let room = given(room, "where the region goes")?.write(None);
        let key = known(given(key, "the key")?);
        *room = Some(Box::new(given(boxes, "the box")?.region(&key, bytes, birth)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_create(
    boxes: Option<&Handle>,
    key: Option<&Key>,
    bytes: u64,
    made: Room<'_, Option<Box<Region>>>,
) -> c_int {
    region((boxes, key), (bytes, Birth::Passing), made)
}

#[unsafe(no_mangle)]
extern "C" fn paceline_create_kept(
    boxes: Option<&Handle>,
    key: Option<&Key>,
    bytes: u64,
    made: Room<'_, Option<Box<Region>>>,
) -> c_int {
    region((boxes, key), (bytes, Birth::Kept), made)
}

#[unsafe(no_mangle)]
extern "C" fn paceline_attach(
    boxes: Option<&Handle>,
    key: Option<&Key>,
    bytes: u64,
    found: Room<'_, Option<Box<Region>>>,
) -> c_int {
    region((boxes, key), (bytes, Birth::Found), found)
}

#[unsafe(no_mangle)]
extern "C" fn paceline_free(region: Option<&Region>) -> c_int {
    call(|| given(region, "the region")?.free())
}

#[unsafe(no_mangle)]
extern "C" fn paceline_region_close(region: Option<Box<Region>>) -> c_int {
    call(|| {
        drop(region);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_bytes(region: Option<&Region>, bytes: Room<'_, u64>) -> c_int {
    call(|| {
        given(bytes, "where the answer goes")?.write(given(region, "the region")?.bytes());
        Ok(())
    })
}

/// # Safety
/// `into` is null or has room for so many bytes, which nobody else looks at before this is over.
#[unsafe(no_mangle)]
unsafe extern "C" fn paceline_read(
    region: Option<&Region>,
    at: u64,
    into: *mut c_void,
    bytes: u64,
    version: Room<'_, u64>,
) -> c_int {
    call(|| {
        let region = given(region, "the region")?.inside(at, bytes)?;
        // SAFETY: as the caller says.
        let into = unsafe { space(into.cast(), bytes, "where the bytes go") }?;
        leave(version, region.read(at, into)?);
        Ok(())
    })
}

/// # Safety
/// `from` is null or has so many bytes, which nobody changes before this is over.
#[unsafe(no_mangle)]
unsafe extern "C" fn paceline_write(
    region: Option<&Region>,
    at: u64,
    from: *const c_void,
    bytes: u64,
    version: Room<'_, u64>,
) -> c_int {
    call(|| {
        let region = given(region, "the region")?.inside(at, bytes)?;
        // SAFETY: as the caller says.
        let from: &[u8] = unsafe { values(from.cast(), bytes, "what is written") }?;
        leave(version, region.write(at, from)?);
        Ok(())
    })
}

/// # Safety
/// `numbers` is null or has so many, which nobody changes before this is over.
#[unsafe(no_mangle)]
unsafe extern "C" fn paceline_add(
    region: Option<&Region>,
    at: u64,
    numbers: *const f32,
    count: u64,
    scale: f32,
    version: Room<'_, u64>,
) -> c_int {
    call(|| {
        let region = given(region, "the region")?.inside(at, count.saturating_mul(4))?;
        // SAFETY: as the caller says.
        let numbers = unsafe { values(numbers, count, "what is added") }?;
        leave(version, region.add(at, numbers, scale)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_accumulate(
    target: Option<&Region>,
    source: Option<&Region>,
    at: u64,
    bytes: u64,
    scale: f32,
    version: Room<'_, u64>,
) -> c_int {
    call(|| {
        let (target, source) = (given(target, "the region")?, given(source, "the region that is added")?);
        leave(version, target.accumulate(at, source, bytes, scale)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_fetch_add(region: Option<&Region>, at: u64, by: i64, before: Room<'_, i64>) -> c_int {
    call(|| {
        leave(before, given(region, "the region")?.fetch_add(at, by)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_notify(region: Option<&Region>, version: Room<'_, u64>) -> c_int {
    call(|| {
        leave(version, given(region, "the region")?.notify()?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn paceline_wait(region: Option<&Region>, version: u64, limit_ms: u64, found: Room<'_, u64>) -> c_int {
    call(|| {
        let now = given(region, "the region")?.wait(version, limit_ms)?;
        leave(found, now);
        let late = || Problem::new(Status::Late, format!("the region is still at version {now}, not {version}"));
        if now < version { Err(late()) } else { Ok(()) }
    })
}
