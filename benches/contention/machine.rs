//! What this machine calls itself.

use std::fs;

use crate::sharing::cores;
use crate::support::results::Machine;

pub(crate) fn this_one() -> Machine {
    let of = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let processor = of("/proc/cpuinfo")
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or_else(|| "unknown".to_owned(), |(_, name)| name.to_owned());
    // Without what a distribution adds to the number.
    let release = of("/proc/sys/kernel/osrelease");
    let kernel = release.split('-').next().unwrap_or_default();
    Machine {
        processor: format!("{processor} ({})", std::env::consts::ARCH),
        cores: cores(),
        system: format!("{} {}", std::env::consts::OS, kernel.trim()),
    }
}
