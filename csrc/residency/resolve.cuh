// What the residency kernels share: the arena, the record of a call, counts over a block.
#pragma once

#include "device.cuh"

constexpr i32 kThreads = ESS_THREADS;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kPageRows = 64;
constexpr i32 kAgeMax = 255;
constexpr i32 kBins = 256;
constexpr u32 kAllLanes = ~0u;
static_assert(kThreads % 32 == 0, "blocks are whole warps");

// The arrays of ess/pool/arena.py, on the device.
struct Arena {
    i32* slot_of;
    i32* row_of;
    i32* last_use;
    i32* ticket_of;
    u8* dirty;
    const i32* blocks;
    u64* hit_age;
};

// What changes from step to step lies on the device, so that a graph can be replayed.
struct Now {
    i32 step;
    i32 ticket;
    i32 query_count;
    i32 block_count;
    i32 stamps;
};

struct Report {
    i32 claimed;
    i32 missing;
    i32 eligible;
    i32 absent;
    i32 hits;
    i32 places;
    i32 late_ticket;
    i32 evicted;
    i32 unwritten;
    i32 faults;
    i32 left;
    i32 held;
};

// Selected entries [query, column]. With a page table `selection` holds positions and the row ids
// are written to `rows`; without one `rows` holds them already. With lengths a position beyond its
// query's is as impossible as one in a page without an id.
struct Selection {
    const i32* positions;
    const i32* page_table;
    const i32* table_row;
    const i32* length;
    i32* rows;
    i64 table_width;
    i64 width;
    i64 row_count;

    __device__ bool names(i32 row) const { return row >= 0 && row < row_count; }

    __device__ i32 translate(i32 query, i32 column) const {
        i64 entry = query * width + column;
        if (page_table == nullptr) return rows[entry];
        i32 position = positions[entry], row = -1;
        if (position >= 0) {
            i64 page = position / kPageRows;
            const bool inside = length == nullptr || position < length[query];
            if (inside && page < table_width)
                row = page_table[table_row[query] * table_width + page];
            row = row < 0 ? -2 : row * kPageRows + position % kPageRows;
        }
        rows[entry] = row;
        return row;
    }
};

// The shared memory of a block: a phase finds it as the one before it left it.
struct Desk {
    i32 count[kWarps][kBins];
    i32 start[kBins];
    u32 ages[kAgeMax + 1];
    u32 of_warp[kWarps];
};

__device__ __forceinline__ u32 lanes_below() { return (1u << (threadIdx.x % 32)) - 1; }

// Of two votes a thread: those of lower threads, and all.
struct Ranks {
    i32 before[2];
    i32 total[2];
};

// All threads of the block take part. A warp's votes are at most 32, a block's at most 1,024, so
// both sums travel in one word.
__device__ __forceinline__ Ranks rank_votes(bool first, bool second, u32* of_warp) {
    const u32 votes[2] = {__ballot_sync(kAllLanes, first), __ballot_sync(kAllLanes, second)};
    const i32 warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) of_warp[warp] = __popc(votes[0]) | __popc(votes[1]) << 16;
    __syncthreads();
    u32 before = 0, total = 0;
#pragma unroll
    for (i32 w = 0; w < kWarps; w++) {
        before += w < warp ? of_warp[w] : 0;
        total += of_warp[w];
    }
    __syncthreads();
    const u32 below = lanes_below();
    return {{i32(before & 0xFFFF) + __popc(votes[0] & below),
             i32(before >> 16) + __popc(votes[1] & below)},
            {i32(total & 0xFFFF), i32(total >> 16)}};
}
