//! What the driver knows about an address.

use crate::code;
use crate::driver::call::{In, Out, driver_api, enter};
use crate::driver::state::State;
use crate::driver::{Outcome, host::Origin};
use std::ffi::c_void;

const TYPE_HOST: u32 = 1;
const TYPE_DEVICE: u32 = 2;

/// An attribute's value, in the width in which it is written.
#[derive(Clone, Copy)]
enum Value {
    Word(u32),
    Long(u64),
}

driver_api! {
    /// An address that is unknown, or has no such attribute, is an error.
    fn cuPointerGetAttribute(data: Out<c_void>, attribute: u32, pointer: u64) {
        data.check()?;
        let state = enter()?;
        state.current()?;
        write(data, attribute_of(&state, attribute, pointer)?.ok_or(code::INVALID_VALUE)?)
    }

    /// An address that is unknown, or has no such attribute, reads as zero.
    fn cuPointerGetAttributes(
        count: u32,
        attributes: In<u32>,
        data: In<Out<c_void>>,
        pointer: u64,
    ) {
        let state = enter()?;
        state.current()?;
        for index in 0..count as usize {
            // SAFETY: the caller vouches for `count` of each.
            let (attribute, data) = unsafe { (attributes.at(index)?, data.at(index)?) };
            data.check()?;
            let value = attribute_of(&state, attribute, pointer)?.unwrap_or(zero(attribute));
            write(data, value)?;
        }
        Ok(())
    }
}

fn write(data: Out<c_void>, value: Value) -> Outcome {
    match value {
        Value::Word(value) => data.cast::<u32>().set(value),
        Value::Long(value) => data.cast::<u64>().set(value),
    }
}

struct Known {
    host: bool,
    registered: bool,
    context: usize,
    device: usize,
    id: u64,
    base: u64,
    len: usize,
}

fn known(state: &State, pointer: u64) -> Option<Known> {
    if let Some(memory) = state.device.find(pointer) {
        return Some(Known {
            host: false,
            registered: false,
            context: memory.context,
            device: memory.device,
            id: memory.id,
            base: memory.base,
            len: memory.len,
        });
    }
    let range = state.host.containing(usize::try_from(pointer).ok()?)?;
    Some(Known {
        host: true,
        registered: range.origin == Origin::Registered,
        context: range.context,
        device: range.device,
        id: range.id,
        base: range.base as u64,
        len: range.len,
    })
}

fn attribute_of(state: &State, attribute: u32, pointer: u64) -> Outcome<Option<Value>> {
    use Value::{Long, Word};

    if !(1..=21).contains(&attribute) {
        return Err(code::INVALID_VALUE);
    }
    let Some(known) = known(state, pointer) else {
        return Ok(None);
    };
    Ok(match attribute {
        1 => Some(Long(known.context as u64)),
        2 => Some(Word(if known.host { TYPE_HOST } else { TYPE_DEVICE })),
        3 => Some(Long(pointer)),
        4 => known.host.then_some(Long(pointer)),
        6 => Some(Word(0)),
        7 => Some(Long(known.id)),
        8 => Some(Word(0)),
        9 => Some(Word(known.device as u32)),
        10 => Some(Word((!known.host).into())),
        11 => Some(Long(known.base)),
        12 => Some(Long(known.len as u64)),
        13 => Some(Word((!known.registered).into())),
        _ => None,
    })
}

/// Nothing, in the width of the attribute.
fn zero(attribute: u32) -> Value {
    match attribute {
        2 | 6 | 8 | 9 | 10 | 13 | 15 | 16 => Value::Word(0),
        _ => Value::Long(0),
    }
}
