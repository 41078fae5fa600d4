//! What the operating system has mapped where.

/// What a range is to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapping {
    Writable,
    ReadOnly,
    /// Some of it is not mapped, or cannot be read.
    Missing,
}

/// Looks the range up in the process's memory map. Where there is no map to
/// read, everything is taken to be writable.
pub(super) fn mapping(base: usize, len: usize) -> Mapping {
    match std::fs::read_to_string("/proc/self/maps") {
        Ok(map) => find(&map, base, base.saturating_add(len)),
        Err(_) => Mapping::Writable,
    }
}

fn find(map: &str, base: usize, end: usize) -> Mapping {
    let mut covered = base;
    let mut found = Mapping::Writable;
    for (start, stop, permissions) in map.lines().filter_map(parse) {
        if stop <= covered {
            continue;
        }
        if start > covered || !permissions.starts_with('r') {
            break;
        }
        if !permissions[1..].starts_with('w') {
            found = Mapping::ReadOnly;
        }
        covered = stop;
        if covered >= end {
            return found;
        }
    }
    Mapping::Missing
}

/// Start, end and permissions of a line like `7f00-8f00 rw-p 0 00:00 0`.
fn parse(line: &str) -> Option<(usize, usize, &str)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, stop) = fields.next()?.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let stop = usize::from_str_radix(stop, 16).ok()?;
    Some((start, stop, fields.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "\
1000-2000 r--p 00000000 00:00 0 /bin/x
2000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0
5000-6000 ---p 00000000 00:00 0
";

    #[test]
    fn a_range_over_two_writable_mappings_is_writable() {
        assert_eq!(find(MAP, 0x2800, 0x3800), Mapping::Writable);
    }

    #[test]
    fn a_range_that_touches_a_read_only_mapping_is_read_only() {
        assert_eq!(find(MAP, 0x1800, 0x2800), Mapping::ReadOnly);
    }

    #[test]
    fn a_range_over_a_gap_or_no_access_is_missing() {
        assert_eq!(find(MAP, 0x3800, 0x4800), Mapping::Missing);
        assert_eq!(find(MAP, 0x5000, 0x5100), Mapping::Missing);
        assert_eq!(find(MAP, 0x9000, 0x9100), Mapping::Missing);
    }
}
