// SPDX-License-Identifier: Apache-2.0
//! Finds libkvm (with the feature `embedded`, libkvm_embedded): in the folder KVM_LIB_DIR when that
//! is set, else where pkg-config says.

use std::env;
use std::path::Path;
use std::process::{exit, Command};

fn main() {
    for name in ["KVM_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    let library = if env::var_os("CARGO_FEATURE_EMBEDDED").is_some() {
        "kvm_embedded"
    } else {
        "kvm"
    };
    let folder = match env::var("KVM_LIB_DIR") {
        Ok(folder) => in_folder(library, &folder),
        Err(_) => from_pkg_config(library),
    };
    match folder {
        Ok(Some(folder)) => println!("cargo:rustc-link-search=native={folder}"),
        Ok(None) => {} // Where the linker looks anyway.
        Err(reason) => {
            eprintln!(
                "kvm-sys: lib{library}.so was not found: {reason}.\n\
                 Either build kvm and set KVM_LIB_DIR to the folder that holds lib{library}.so\n\
                 (build/release/lib in kvm's tree; LD_LIBRARY_PATH needs it as well when programs\n\
                 run), or install kvm, and set PKG_CONFIG_PATH if it is not below /usr."
            );
            exit(1);
        }
    }
    println!("cargo:rustc-link-lib=dylib={library}");
}

fn in_folder(library: &str, folder: &str) -> Result<Option<String>, String> {
    let file = Path::new(folder).join(format!("lib{library}.so"));
    println!("cargo:rerun-if-changed={}", file.display());
    if file.exists() {
        Ok(Some(folder.to_string()))
    } else {
        Err(format!(
            "KVM_LIB_DIR names {folder}, which has no such file"
        ))
    }
}

fn from_pkg_config(library: &str) -> Result<Option<String>, String> {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".to_string());
    let output = Command::new(&program)
        .args(["--libs-only-L", library])
        .output()
        .map_err(|error| format!("KVM_LIB_DIR is not set, and {program} does not run ({error})"))?;
    if !output.status.success() {
        return Err(format!(
            "KVM_LIB_DIR is not set, and {program} does not know {library}"
        ));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .split_whitespace()
        .find_map(|flag| flag.strip_prefix("-L"))
        .map(str::to_string))
}
