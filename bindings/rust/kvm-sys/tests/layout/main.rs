// SPDX-License-Identifier: Apache-2.0
//! The sizes, offsets and values that Rust sees are those that C sees: both are written out in the
//! form of tests/abi/kvm_layout.txt, and must be the same text.

use std::fmt::Write;
use std::mem::{size_of, MaybeUninit};
use std::path::PathBuf;

use kvm_sys::*;

fn size_of_pointee<T>(_: *const T) -> usize {
    size_of::<T>()
}

macro_rules! structures {
    ($($name:ident { $($field:ident,)* })*) => {
        pub fn structures(out: &mut String) {
            $(
                writeln!(out, "{} {}", stringify!($name), size_of::<$name>()).unwrap();
                let memory = MaybeUninit::<$name>::uninit();
                let base = memory.as_ptr();
                $(
                    // SAFETY: an address inside `memory`; nothing is read.
                    let field = unsafe { std::ptr::addr_of!((*base).$field) };
                    let offset = field as usize - base as usize;
                    let text = stringify!($field).trim_start_matches("r#");
                    writeln!(out, "  {text} {offset} {}", size_of_pointee(field)).unwrap();
                )*
            )*
        }
        pub fn alignments() -> Vec<(&'static str, usize)> {
            vec![$((stringify!($name), std::mem::align_of::<$name>()),)*]
        }
    };
}

macro_rules! constants {
    ($($name:ident,)*) => {
        pub fn constants(out: &mut String) {
            $(writeln!(out, "{} {}", stringify!($name), $name as i64).unwrap();)*
        }
    };
}

mod table {
    use super::*;
    include!("table.rs");
}

fn recorded() -> String {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let path = here.join("../../../tests/abi/kvm_layout.txt");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.to_string() + "\n")
        .collect()
}

#[test]
fn layout_is_that_of_c() {
    let mut here = String::new();
    table::structures(&mut here);
    table::constants(&mut here);
    let recorded = recorded();
    let differences: Vec<_> = here
        .lines()
        .zip(recorded.lines())
        .filter(|(rust, c)| rust != c)
        .map(|(rust, c)| format!("Rust: {rust}\n   C: {c}"))
        .take(5)
        .collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert_eq!(here.lines().count(), recorded.lines().count());
}

/// The record has no alignments: they follow from the fields, of which the widest has 8 bytes. A
/// hash has bytes alone.
#[test]
fn structures_are_aligned_as_their_widest_field() {
    for (name, alignment) in table::alignments() {
        let expected = if name == "kvm_prefix_hash" { 1 } else { 8 };
        assert_eq!(alignment, expected, "{name}");
    }
}

#[test]
fn the_library_is_of_the_headers_version() {
    let expected = KVM_VERSION_MAJOR * 1_000_000 + KVM_VERSION_MINOR * 1_000 + KVM_VERSION_PATCH;
    // SAFETY: may be called at any time.
    assert_eq!(unsafe { kvm_version() }, expected);
}

/// `Default` sets the first field and nothing else, and C accepts it.
#[test]
fn default_is_struct_size_and_zeros() {
    let params = kvm_step_params::default();
    assert_eq!(params.struct_size as usize, size_of::<kvm_step_params>());
    // SAFETY: plain numbers and pointers without padding that matters: viewed as 32-bit words.
    let words: [u32; size_of::<kvm_step_params>() / 4] = unsafe { std::mem::transmute(params) };
    assert!(words[1..].iter().all(|word| *word == 0));

    let item = kvm_item::default();
    assert_eq!((item.seq, item.reserved), (0, 0));
}
