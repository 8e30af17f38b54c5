// claim_each() of ess/pool/lru/specification.py: slots for the rows that a step writes, in all
// groups at once. The phases of a plan, each in one launch over the groups: with a launch a group
// and phase there would be hundreds at the head of every step.
//
// The calls lie on the device, one for each group, and write the same rows. Their arenas share the
// arrays of the slab and differ in blocks, so no two groups touch one slot. A call has one query,
// so a block that assigns its rows serves it too. `each` is how many blocks a group has in this
// launch.
#include "phases.cuh"

namespace {

struct Each {
    const Resolve* calls;
    i64 each;

    // This block's call, for all its threads; which of the group's blocks it is.
    __device__ i32 take(Resolve& call) const {
        const i32 group = i32(blockIdx.x / each);
        const u32* from = (const u32*)(calls + group);
        for (i32 i = threadIdx.x; i < i32(sizeof(Resolve) / sizeof(u32)); i += kThreads)
            ((u32*)&call)[i] = from[i];
        __syncthreads();
        return i32(blockIdx.x - group * each);
    }
};

}  // namespace

#define ESS_EACH_PHASE(name) \
    ESS_KERNEL __launch_bounds__(kThreads) name(const __grid_constant__ Each each)

ESS_EACH_PHASE(ess_each_probe) {
    ESS_SHARED Desk desk;
    ESS_SHARED Resolve call;
    probe(call, each.take(call), desk);
}

ESS_EACH_PHASE(ess_each_count) {
    ESS_SHARED Desk desk;
    ESS_SHARED Resolve call;
    const i32 block = each.take(call), part = block - i32(call.tile_max);
    if (call.report->absent == 0) return;
    if (part >= 0) count_rows(call, part, name_first(call, Entry::of(call, part)));
    else if (block < call.tile_count()) count_slots(call, block, look(call, block), desk);
}

ESS_EACH_PHASE(ess_each_rank) {
    ESS_SHARED Desk desk;
    ESS_SHARED Resolve call;
    rank_tile(call, each.take(call), desk);
}

ESS_EACH_PHASE(ess_each_serve) {
    ESS_SHARED Desk desk;
    ESS_SHARED Resolve call;
    each.take(call);
    if (call.report->absent != 0)
        for (i32 part = 0; part < call.parts_each(); part++) {
            const Entry at = Entry::of(call, part);
            assign(call, part, at, name_first(call, at), desk);
        }
    __syncthreads();
    serve(call, 0, desk);
}
