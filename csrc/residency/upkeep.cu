// What happens to slots between plans: settle(), drop() and clear_block() of
// ess/pool/lru/specification.py. Nothing happens when a copy lands (resolve.cuh, Landed).
//
// One thread an element; a negative one is passed over. No two elements of a list name the same
// slot; rows that leave may be named twice, since an exchange gives their slot to one of the
// threads. The number of elements may lie on the device, with the list.
//
// Blocks are cleared all or none, as a chunk changes its owner whole, so one block of threads does
// it: all its threads have looked before one clears.
#include "resolve.cuh"

namespace {

struct Upkeep {
    Arena arena;
    const i32* list;
    const i32* count;
    Moment moment;
    Report* report;
    i64 count_max;

    __device__ i32 size() const {
        return count != nullptr && *count < count_max ? *count : i32(count_max);
    }

    // The i-th slot of the listed blocks, and whether something holds it there.
    __device__ i32 slot(i32 i) const { return list[i / kPageRows] + i % kPageRows; }

    __device__ bool is_held(i32 at, Landed landed) const {
        if (arena.row_of[at] < 0) return false;
        const bool bound = (arena.dirty[at] != 0) | !landed.has(arena.ticket_of[at]);
        return bound | (arena.last_use[at] >= moment.now->step);
    }

    __device__ void empty(i32 at) const {
        arena.row_of[at] = -1;
        arena.dirty[at] = 0;
        arena.ticket_of[at] = 0;
        atomicAdd(&report->left, 1);
    }
};

}  // namespace

#define ESS_UPKEEP(name) \
    ESS_KERNEL __launch_bounds__(kThreads) name(const __grid_constant__ Upkeep call)
#define ESS_EACH(i) \
    for (i32 i = blockIdx.x * kThreads + threadIdx.x; i < call.size(); i += gridDim.x * kThreads)

// The host copies of these slots are as new as they are.
ESS_UPKEEP(ess_settle) {
    ESS_EACH(i) if (call.list[i] >= 0) call.arena.dirty[call.list[i]] = 0;
}

// These rows leave, whatever their state; absent ones are passed over.
ESS_UPKEEP(ess_drop) {
    ESS_EACH(i) {
        if (call.list[i] < 0) continue;
        const i32 slot = atomicExch(&call.arena.slot_of[call.list[i]], -1);
        call.arena.forget(call.list[i]);
        if (slot >= 0) call.empty(slot);
    }
}

// All rows of these blocks leave, unless one is held: then none does, and the report has how many.
ESS_UPKEEP(ess_clear_blocks) {
    const i32 count = call.size() * kPageRows;
    const Landed landed = call.moment.landed();
    i32 held = 0;
    for (i32 base = 0; base < count; base += kThreads) {
        const i32 i = base + i32(threadIdx.x);
        held += __syncthreads_count(i < count && call.is_held(call.slot(i), landed));
    }
    if (threadIdx.x == 0) call.report->held = held;
    for (i32 i = threadIdx.x; held == 0 && i < count; i += kThreads) {
        const i32 at = call.slot(i), row = call.arena.row_of[at];
        if (row < 0) continue;
        call.arena.slot_of[row] = -1;
        call.arena.forget(row);
        call.empty(at);
    }
}
