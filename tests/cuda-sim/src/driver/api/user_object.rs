//! User objects.
//!
//! `cuda.h` names `CUDA_ERROR_INVALID_VALUE` alone as an error of these calls.

use crate::code;
use crate::driver::Outcome;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::state::State;
use crate::driver::user_object::{Handle, Reference, UserObject};
use std::ffi::c_void;
use std::iter;
use std::sync::Arc;

const NO_DESTRUCTOR_SYNC: u32 = 1;
const MOVE: u32 = 1;

driver_api! {
    fn cuUserObjectCreate(
        object: Out<usize>,
        data: usize,
        destroy: Option<unsafe extern "C" fn(*mut c_void)>,
        initial: u32,
        flags: u32,
    ) {
        object.check()?;
        let destroy = destroy.ok_or(code::INVALID_VALUE)?;
        if flags != NO_DESTRUCTOR_SYNC {
            return Err(code::INVALID_VALUE);
        }
        let initial = count_of(initial)?;
        let mut state = enter()?;
        // Handles of objects that are gone are of no more use.
        state.user_objects.retain(|_, it| it.object.strong_count() > 0);
        let handle = state.new_handle();
        let made = UserObject::new(destroy, data).map_err(|_| code::OUT_OF_MEMORY)?;
        state.user_objects.insert(handle, Handle {
            object: Arc::downgrade(&made),
            references: iter::repeat_n(made, initial).collect(),
        });
        object.set(handle)
    }

    fn cuUserObjectRetain(object: usize, count: u32) {
        let count = count_of(count)?;
        let mut state = enter()?;
        let added = state.alive(object)?;
        let handle = state.user_objects.get_mut(&object).ok_or(code::INVALID_VALUE)?;
        handle.references.extend(iter::repeat_n(added, count));
        Ok(())
    }

    fn cuUserObjectRelease(object: usize, count: u32) {
        let mut state = enter()?;
        state.take_own(object, count_of(count)?).map(drop)
    }

    /// Into a graph that is being captured, too: "All operations other than
    /// destroy and node removal are permitted on the graph while the capture
    /// sequence is in progress." (`cuStreamGetCaptureInfo`)
    fn cuGraphRetainUserObject(graph: usize, object: usize, count: u32, flags: u32) {
        let count = count_of(count)?;
        if flags & !MOVE != 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut state = enter()?;
        state.references(graph)?;
        let references = if flags & MOVE != 0 {
            state.take_own(object, count)?
        } else {
            iter::repeat_n(state.alive(object)?, count).collect()
        };
        state.references(graph)?.extend(references);
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: usize, object: usize, count: u32) {
        let count = count_of(count)?;
        let mut state = enter()?;
        let released = state.alive(object)?;
        let references = state.references(graph)?;
        let owned = references.iter().filter(|it| Arc::ptr_eq(it, &released)).count();
        if owned < count {
            return Err(code::INVALID_VALUE);
        }
        for _ in 0..count {
            let first = references.iter().position(|it| Arc::ptr_eq(it, &released));
            first.map(|index| references.swap_remove(index));
        }
        Ok(())
    }
}

/// "Must be nonzero and not larger than `INT_MAX`."
fn count_of(count: u32) -> Outcome<usize> {
    match i32::try_from(count) {
        Ok(1..) => Ok(count as usize),
        _ => Err(code::INVALID_VALUE),
    }
}

impl State {
    /// One more reference to an object that has any.
    fn alive(&self, object: usize) -> Outcome<Reference> {
        let handle = self.user_objects.get(&object);
        handle
            .and_then(|it| it.object.upgrade())
            .ok_or(code::INVALID_VALUE)
    }

    /// Takes references away from the program.
    fn take_own(&mut self, object: usize, count: usize) -> Outcome<Vec<Reference>> {
        let handle = self
            .user_objects
            .get_mut(&object)
            .filter(|it| it.references.len() >= count)
            .ok_or(code::INVALID_VALUE)?;
        let left = handle.references.len() - count;
        Ok(handle.references.split_off(left))
    }
}
