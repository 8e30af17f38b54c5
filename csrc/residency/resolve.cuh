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

// The arrays of ess/pool/arena.py, on the device. How many blocks a group owns changes with its
// budget, so it lies there too.
struct Arena {
    i32* slot_of;
    i32* row_of;
    i32* last_use;
    i32* ticket_of;
    u8* dirty;
    const i32* blocks;
    const i32* block_count;
    u64* hit_age;

    __device__ i32 slot_count() const { return *block_count * kPageRows; }
};

// What changes from step to step lies on the device, so that a graph can be replayed. All groups of
// a step share it: what differs between its calls are constants of their records.
struct Now {
    i32 step;
    i32 ticket;
    i32 landed;
    i32 behind;
    i32 query_count;
    i32 stamps;
};

// Which copies have landed, by lane: even tickets are of the lane that steps fetch on, odd ones of
// the lane of landings.
//
// The specification clears the ticket of a slot when its copy has landed; here it stays, and a
// number says up to which tickets all have landed. These are equivalent because a lane is first in
// first out and its tickets are taken in the order in which its copies are queued: the copies that
// have landed are a prefix of the tickets at any time, and a prefix is a number. Another copy that
// takes the slot gives it a later ticket, so "one that has passed to another copy keeps it" holds
// too. The lanes are not ordered with one another, so each has its own number.
//
// Nobody writes the number while kernels read it, or two phases of a call could see two of them: a
// call is told how many copies of its step the stream that it runs on has waited for. The result is
// thus a function of what was queued, and not of how fast copies were.
//
// Wrong if tickets of a lane are queued out of order, on two streams, or start over while a slot
// has an old one: then they must be cleared first.
struct Landed {
    i32 upto[2];

    __device__ bool has(i32 ticket) const { return ticket <= ((ticket & 1) ? upto[1] : upto[0]); }
};

// A call's place in its step: its own copy is the copy-th, and the first `waited` of them have been
// waited for, none of them if it is 0. Constants of a record; a lane's tickets are two apart.
struct Moment {
    const Now* now;
    i64 copy;
    i64 waited;

    __device__ i32 ticket() const { return now->ticket + 2 * i32(copy); }

    __device__ Landed landed() const {
        Landed landed = {{now->landed, now->behind}};
        if (waited > 0) landed.upto[now->ticket & 1] = now->ticket + 2 * i32(waited);
        return landed;
    }
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
