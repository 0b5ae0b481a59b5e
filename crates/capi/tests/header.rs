//! The header and the library have the same functions, with the same parameters, and the test program calls each.

use std::collections::BTreeMap;
use std::path::Path;

/// What a type of the header is in `calls.rs`.
const TYPES: &[(&str, &str)] = &[
    ("const char *", "*const c_char"),
    ("const float *", "*const f32"),
    ("const paceline_box *", "Option<&Handle>"),
    ("const paceline_key *", "Option<&Key>"),
    ("const paceline_options *", "Option<&Options>"),
    ("const paceline_region *", "Option<&Region>"),
    ("const uint8_t [16]", "Option<&[u8; 16]>"),
    ("const void *", "*const c_void"),
    ("float", "f32"),
    ("int", "c_int"),
    ("int *", "Room<'_, c_int>"),
    ("int64_t", "i64"),
    ("int64_t *", "Room<'_, i64>"),
    ("paceline_box *", "Option<Box<Handle>>"),
    ("paceline_box **", "Room<'_, Option<Box<Handle>>>"),
    ("paceline_key *", "Room<'_, Key>"),
    ("paceline_region *", "Option<Box<Region>>"),
    ("paceline_region **", "Room<'_, Option<Box<Region>>>"),
    ("paceline_usage_info *", "Room<'_, Usage>"),
    ("uint64_t", "u64"),
    ("uint64_t *", "Room<'_, u64>"),
    ("void *", "*mut c_void"),
];

fn text(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// A function's types, the result's last.
type Signature = Vec<String>;

fn of_rust(declared: &str) -> String {
    let found = TYPES.iter().find(|(c, _)| *c == declared);
    found.unwrap_or_else(|| panic!("no type in Rust is known for `{declared}`")).1.into()
}

/// A type and a name, apart: `const float *numbers`, `uint64_t at`, `const uint8_t secret[16]`.
fn type_of(parameter: &str) -> String {
    let (bare, array) = parameter.find('[').map_or((parameter, ""), |at| parameter.split_at(at));
    let name = bare.len() - bare.chars().rev().take_while(|sign| sign.is_alphanumeric() || *sign == '_').count();
    let spaced = if array.is_empty() { String::new() } else { format!(" {array}") };
    of_rust(&format!("{}{spaced}", bare[..name].trim()))
}

fn header() -> BTreeMap<String, Signature> {
    let all = text("include/paceline.h");
    let mut declared = BTreeMap::new();
    for line in all.lines().filter(|line| line.ends_with(");") && !line.starts_with([' ', '/'])) {
        let (head, parameters) = line.trim_end_matches(");").split_once('(').unwrap();
        let at = head.find("paceline_").unwrap();
        let parameters = parameters.split(',').map(str::trim).filter(|parameter| *parameter != "void");
        let mut types: Signature = parameters.map(type_of).collect();
        types.push(of_rust(head[..at].trim()));
        assert!(declared.insert(head[at..].to_owned(), types).is_none(), "{line}");
    }
    declared
}

fn library() -> BTreeMap<String, Signature> {
    let all = text("src/calls.rs");
    let functions = all.split("#[unsafe(no_mangle)]").skip(1).map(|function| {
        let head = function.split_once(" {\n").unwrap().0;
        let (name, rest) = head.split_once("extern \"C\" fn ").unwrap().1.split_once('(').unwrap();
        let (parameters, result) = rest.rsplit_once(") -> ").unwrap();
        // A comma inside of `<>` has no type with a colon behind it.
        let types = parameters.split(": ").skip(1).map(|piece| {
            let end = piece.rfind(',').filter(|_| !piece.trim_end().ends_with('>')).unwrap_or(piece.len());
            piece[..end].trim().to_owned()
        });
        (name.to_owned(), types.chain([result.trim().to_owned()]).collect())
    });
    functions.collect()
}

#[test]
fn the_header_declares_what_the_library_has() {
    let (header, library) = (header(), library());
    assert_eq!(header.len(), 20, "{:?}", header.keys());
    assert_eq!(header, library);
}

#[test]
fn the_test_program_calls_every_function() {
    let program = text("tests/box.c");
    for name in header().keys() {
        assert!(program.contains(&format!("{name}(")), "tests/box.c does not call {name}");
    }
}

#[test]
fn numbers_of_statuses_are_the_same() {
    let (header, library) = (text("include/paceline.h"), text("src/problem.rs"));
    let of_header = header.split("enum paceline_status {").nth(1).unwrap().split('}').next().unwrap();
    let of_library = library.split("pub enum Status {").nth(1).unwrap().split('}').next().unwrap();
    let numbers = |lines: &str| -> BTreeMap<String, i32> {
        let pairs = lines.lines().filter_map(|line| line.split_once(" = "));
        let number = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap();
        let name = |name: &str| name.trim().trim_start_matches("PACELINE_").to_uppercase();
        pairs.map(|(of, rest)| (name(of), number(rest))).collect()
    };
    assert_eq!(numbers(of_header), numbers(of_library));
    assert_eq!(numbers(of_header).len(), 8);
}
