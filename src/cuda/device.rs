//! What a device does with pageable memory.

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::{CudaError, driver};

/// Whether nothing promises that a pageable source is staged: devices that use
/// the host's page tables (Grace), integrated ones, and, since no document
/// says otherwise, those that can access pageable memory at all, unless the
/// program vouches for them.
pub(super) fn reads_pageable_late(
    context: &CudaContext,
    trusts_pageable_access: bool,
) -> Result<bool, CudaError> {
    let has = |attribute| driver::attribute(context, attribute).map(|value| value != 0);
    Ok(
        has(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)?
            || has(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)?
            || (!trusts_pageable_access
                && has(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)?),
    )
}
