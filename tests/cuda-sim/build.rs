//! Names the shared object `libcuda.so` to the dynamic linker, so that once it
//! has been loaded from its own path, `dlopen("libcuda.so")` finds it again.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
