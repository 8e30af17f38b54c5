// What happens to slots between plans: land(), settle() and drop() of ess/pool/lru.py.
//
// One thread an element; no two elements of a list may name the same row or slot, so nothing is
// ordered. The number of elements lies on the device, with the list, as a plan has left it there.
#include "resolve.cuh"

namespace {

struct Upkeep {
    Arena arena;
    const i32* list;
    const i32* count;
    const i32* ticket;
    i64 count_max;

    __device__ i32 size() const {
        return count != nullptr && *count < count_max ? *count : i32(count_max);
    }
};

}  // namespace

#define ESS_UPKEEP(name) \
    ESS_KERNEL __launch_bounds__(kThreads) name(const __grid_constant__ Upkeep call)
#define ESS_EACH(i) \
    for (i32 i = blockIdx.x * kThreads + threadIdx.x; i < call.size(); i += gridDim.x * kThreads)

// The copy that brought these slots is complete; one that has passed to another copy keeps it.
ESS_UPKEEP(ess_land) {
    ESS_EACH(i) {
        i32* ticket = call.arena.ticket_of + call.list[i];
        if (*ticket == *call.ticket) *ticket = 0;
    }
}

// The host copies of these slots are as new as they are.
ESS_UPKEEP(ess_settle) {
    ESS_EACH(i) call.arena.dirty[call.list[i]] = 0;
}

// These rows leave, whatever their state; absent ones are passed over.
ESS_UPKEEP(ess_drop) {
    ESS_EACH(i) {
        const i32 row = call.list[i], slot = call.arena.slot_of[row];
        if (slot < 0) continue;
        call.arena.slot_of[row] = -1;
        call.arena.row_of[slot] = -1;
        call.arena.dirty[slot] = 0;
        call.arena.ticket_of[slot] = 0;
    }
}
