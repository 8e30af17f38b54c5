// RESIDENT: every row of the batch has landed, so positions become slots and nothing is decided.
//
// It runs as the top-k's epilogue, one thread an entry, and stamps only when the host has said that
// room is getting scarce (now->stamps): a step that stamps nothing writes nothing but its slots.
// All who stamp a slot write the same step. A row that is not there after all, which the ledger
// excludes, is counted as a fault and left out.
#include "resolve.cuh"

namespace {

struct Locate {
    Arena arena;
    Selection selection;
    Moment moment;
    const i32* queries;
    Report* report;
    i32* slots;
    i64 query_first;
    i64 split_width;

    __device__ i32 slot(i32 query, i32 column, Landed landed) const {
        const i32 row = selection.translate(query, column);
        if (row == -1) return -1;
        const i32 found = selection.names(row) ? arena.slot_of[row] : -1;
        if (found >= 0 && landed.has(arena.ticket_of[found])) return found;
        atomicAdd(&report->faults, 1);
        return -1;
    }
};

}  // namespace

ESS_KERNEL __launch_bounds__(kThreads) ess_locate(const __grid_constant__ Locate call) {
    const i32 query = blockIdx.x, step = call.moment.now->step;
    if (query >= *call.queries - call.query_first) return;
    const bool stamps = call.moment.now->stamps != 0;
    const Landed landed = call.moment.landed();
    for (i32 column = threadIdx.x; column < call.selection.width; column += kThreads) {
        const i32 slot = call.slot(query, column, landed);
        call.slots[query * call.split_width + column] = slot;
        if (stamps && slot >= 0) store_relaxed(&call.arena.last_use[slot], step);
    }
}
