// Gather and scatter by the copy engine of a multiprocessor (sm_90): whole rows, no registers.
//
// Every thread works alone, on a ring of kDepth rows of shared memory with one arrival barrier
// each. A row is loaded into its place, and as soon as it has arrived it is stored from there. The
// place is loaded again only when the store has read it. The refill of a place happens one
// turn after its store was committed, while the following store is under way (at most one store may
// be unread then), so a thread waits for reads of shared memory only when they are slower than the
// wire. The barrier of a place is used once per round, as long as there are rows, so the round's
// number is its parity. When the list has ended it has ended for all places: they are refilled in
// turn, hence an empty first place at the end of a round means that all are empty.
//
// Rows are multiples of 16 bytes, at addresses that are. 64 threads with four rows of 656 bytes
// keep 126 to 168 KB in flight with one block.
#include "move.cuh"

namespace {

constexpr i32 kDepth = ESS_DEPTH;
constexpr u32 kRowBytes = ESS_ROW_BYTES;
static_assert(kRowBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
static_assert(kDepth >= 2, "a place is refilled while another is in use");

struct Ring {
    const Move& move;
    u8* rows;
    u64* arrivals;
    i32 count;
    i32 next;
    i32 step;

    __device__ u8* place(i32 d) const { return rows + (d * blockDim.x + threadIdx.x) * kRowBytes; }

    __device__ u64* arrival(i32 d) const { return arrivals + d * blockDim.x + threadIdx.x; }

    // Starts the next pair's load into place d; its target row, or -1 at the end of the list.
    __device__ i32 refill(i32 d) {
        while (next < count) {
            i32 source = move.source_row(next), target = move.target_row(next);
            next += step;
            if (source < 0 || target < 0) continue;
            bulk_load(place(d), move.source_at(source), kRowBytes, arrival(d));
            return target;
        }
        return -1;
    }
};

}  // namespace

ESS_KERNEL __launch_bounds__(128, 1) ess_ring_rows(const __grid_constant__ Move move) {
    ESS_DYNAMIC_SHARED(shared);
    u64* arrivals = (u64*)(shared + kDepth * blockDim.x * kRowBytes);
    Ring ring = {move, shared, arrivals, move.pair_count(),
                 i32(blockIdx.x * blockDim.x + threadIdx.x), i32(gridDim.x * blockDim.x)};
    for (i32 d = 0; d < kDepth; d++) arrival_init(ring.arrival(d));
    arrivals_ready();
    i32 target[kDepth];
#pragma unroll
    for (i32 d = 0; d < kDepth - 1; d++) target[d] = ring.refill(d);
    target[kDepth - 1] = -1;
    for (u32 parity = 0; target[0] >= 0; parity ^= 1) {
#pragma unroll
        for (i32 d = 0; d < kDepth; d++) {
            if (target[d] >= 0) {
                bulk_wait(ring.arrival(d), parity);
                bulk_store(move.target_at(target[d]), ring.place(d), kRowBytes);
            }
            bulk_commit();
            const i32 before = (d + kDepth - 1) % kDepth;
            bulk_wait_read<1>();
            target[before] = ring.refill(before);
        }
    }
    bulk_wait_written();
}
