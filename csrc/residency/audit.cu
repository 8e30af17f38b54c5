// check() of ess/pool/lru/arena.py: what is wrong with the residency of a group, by kind.
//
// Slots are audited from their side and rows from theirs. A row whose slot belongs to another group
// contradicts nothing that either side sees; but then more rows have slots than slots have rows.
#include "resolve.cuh"

namespace {

// In the order of the sentences in ess/pool/lru/cuda_audit.py.
enum Kind {
    kBlock, kRow, kElsewhere, kFuture, kDirtyInFlight, kFreeButBound, kTicket, kStray, kKinds
};

// Findings begin as zero, the first of each kind as the largest number.
struct Audit {
    Arena arena;
    Moment moment;
    i32 *found, *first;
    i32 *used, *resident;
    i64 row_count;
    i64 slot_count;

    __device__ void require(bool sound, Kind kind, i32 where) const {
        if (sound) return;
        atomicAdd(&found[kind], 1);
        atomicMin(&first[kind], where);
    }

    __device__ bool block_is_sound(i32 block) const {
        const i32 start = arena.blocks[block];
        if (start < 0 || start % kPageRows != 0 || start >= slot_count) return false;
        return block == 0 || arena.blocks[block - 1] < start;
    }

    __device__ void slot(i32 at, Landed landed) const {
        const i32 row = arena.row_of[at], ticket = arena.ticket_of[at];
        const bool is_landed = landed.has(ticket);
        const bool is_used = row >= 0, is_dirty = arena.dirty[at] != 0;
        const bool possible = row >= -1 && row < row_count;
        require(possible, kRow, at);
        require(!is_used || !possible || arena.slot_of[row] == at, kElsewhere, at);
        require(!is_used || arena.last_use[at] <= moment.now->step, kFuture, at);
        require(!is_dirty || is_landed, kDirtyInFlight, at);
        require(is_used || (!is_dirty && is_landed), kFreeButBound, at);
        require(ticket >= 0, kTicket, at);
        if (is_used) atomicAdd(used, 1);
    }

    __device__ void row(i32 row) const {
        const i32 at = arena.slot_of[row];
        if (at == -1) return;
        atomicAdd(resident, 1);
        require(at >= 0 && at < slot_count && arena.row_of[at] == row, kStray, row);
    }
};

}  // namespace

ESS_KERNEL __launch_bounds__(kThreads) ess_audit(const __grid_constant__ Audit call) {
    const i32 start = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
    const i32 slots = call.arena.slot_count();
    const Landed landed = call.moment.landed();
    for (i32 i = start; i < slots; i += step) {
        const i32 block = i / kPageRows;
        const bool sound = call.block_is_sound(block);
        if (i % kPageRows == 0) call.require(sound, kBlock, call.arena.blocks[block]);
        if (sound) call.slot(call.arena.blocks[block] + i % kPageRows, landed);
    }
    for (i64 row = start; row < call.row_count; row += step) call.row(i32(row));
}
