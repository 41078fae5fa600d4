//! Graphs, which come from captures only.

use crate::code;
use crate::driver::Outcome;
use crate::driver::call::{Out, driver_api, enter};

const AUTO_FREE_ON_LAUNCH: u64 = 1;
const DEVICE_LAUNCH: u64 = 4;
const ALL_FLAGS: u64 = 15;

driver_api! {
    fn cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, flags: u64) {
        instantiate(executable, graph, flags)
    }

    fn cuGraphInstantiate_v2(
        executable: Out<usize>,
        graph: usize,
        _error_node: usize,
        _log: usize,
        _log_size: usize,
    ) {
        instantiate(executable, graph, 0)
    }

    fn cuGraphUpload(executable: usize, stream: usize) {
        let mut state = enter()?;
        state.executables.get(&executable).ok_or(code::INVALID_HANDLE)?;
        state.stream(stream)?;
        Ok(())
    }

    fn cuGraphLaunch(executable: usize, stream: usize) {
        let mut state = enter()?;
        state.current()?;
        let found = state.executables.get(&executable).ok_or(code::INVALID_HANDLE)?;
        let graph = found.clone();
        let stream = state.stream(stream)?;
        state.launch(&graph, stream)
    }

    fn cuGraphExecDestroy(executable: usize) {
        let mut state = enter()?;
        let found = state.executables.remove(&executable);
        found.map(drop).ok_or(code::INVALID_HANDLE)
    }

    fn cuGraphDestroy(graph: usize) {
        let mut state = enter()?;
        let found = state.graphs.remove(&graph);
        found.map(drop).ok_or(code::INVALID_HANDLE)
    }

    /// Only the number of nodes can be asked for.
    fn cuGraphGetNodes(graph: usize, nodes: Out<usize>, count: Out<usize>) {
        let state = enter()?;
        let found = state.graphs.get(&graph).ok_or(code::INVALID_HANDLE)?;
        if nodes.check().is_ok() {
            return Err(code::NOT_SUPPORTED);
        }
        count.set(found.len())
    }
}

fn instantiate(executable: Out<usize>, graph: usize, flags: u64) -> Outcome {
    if flags & !ALL_FLAGS != 0 || flags & DEVICE_LAUNCH != 0 && flags & AUTO_FREE_ON_LAUNCH != 0 {
        return Err(code::INVALID_VALUE);
    }
    executable.check()?;
    let mut state = enter()?;
    let found = state.graphs.get(&graph).ok_or(code::INVALID_HANDLE)?;
    let found = found.clone();
    let handle = state.new_handle();
    state.executables.insert(handle, found);
    executable.set(handle)
}
