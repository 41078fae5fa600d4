//! Cargo accepts a `links` key only beside a build script. There is nothing
//! to build: see `links` in `Cargo.toml` for what the key is for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
