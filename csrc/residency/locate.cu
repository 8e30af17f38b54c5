// RESIDENT: every row of the batch has landed, so positions become slots and nothing is decided.
//
// It runs behind the top-k, one thread an entry, and stamps only when the host has said that room
// is getting scarce (now->stamps): a step that stamps nothing writes nothing but its slots. All
// threads that stamp a slot write the same step. A row that is not there after all, which the
// ledger excludes, is counted as a fault and left out.
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

    __device__ i32 slot(i32 row, Landed landed) const {
        if (row == -1) return -1;
        const i32 held = selection.names(row) ? arena.slot_of[row] : -1;
        if (held >= 0 && landed.has(arena.ticket_of[held])) return held;
        atomicAdd(&report->faults, 1);
        return -1;
    }

    __device__ void locate(i32 query, const i32 (&column)[kColumns], const i32 (&row)[kColumns],
                           i32 step, bool stamps, Landed landed) const {
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            if (column[i] >= selection.width) continue;
            const i32 held = slot(row[i], landed);
            slots[query * split_width + column[i]] = held;
            if (stamps && held >= 0) store_relaxed(&arena.last_use[held], step);
        }
    }
};

}  // namespace

ESS_KERNEL __launch_bounds__(kThreads) ess_locate(const __grid_constant__ Locate call) {
    const i32 query = blockIdx.x, step = call.moment.now->step;
    if (query >= *call.queries - call.query_first) return;
    const bool stamps = call.moment.now->stamps != 0;
    const Landed landed = call.moment.landed();
    for (i32 base = 0; base < call.selection.width; base += kColumns * kThreads) {
        i32 column[kColumns], row[kColumns];
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) column[i] = base + i * kThreads + i32(threadIdx.x);
        call.selection.translate(query, column, true, row);
        call.locate(query, column, row, step, stamps, landed);
    }
}
