// What the residency kernels share: the arena, the record of a call, counts over a block.
#pragma once

#include "device.cuh"

constexpr i32 kThreads = ESS_THREADS;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kPageRows = 64;
constexpr i32 kAgeMax = 255;
constexpr i32 kBins = 256;
constexpr u32 kAllLanes = ~0u;
constexpr i32 kNever = 2147483647;
static_assert(kThreads % 32 == 0, "blocks are whole warps");

// Entries of a query that a thread looks at together, a block apart, so that their loads are under
// way at once: what the top 2,048 take in one turn.
constexpr i32 kColumns = kThreads > 512 ? 2 : 4;

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
    i32 even, odd;

    __device__ bool has(i32 ticket) const { return ticket <= ((ticket & 1) ? odd : even); }
};

// A call's place in its step: its own copy is the copy-th, and the first `waited` of them have been
// waited for, none of them if it is 0. Constants of a record; a lane's tickets are two apart.
struct Moment {
    const Now* now;
    i64 copy;
    i64 waited;

    __device__ i32 ticket() const { return now->ticket + 2 * i32(copy); }

    __device__ Landed landed() const {
        const i32 upto = now->ticket + 2 * i32(waited);
        const bool is_odd = now->ticket & 1, tells = waited > 0;
        return {tells && !is_odd ? upto : now->landed, tells && is_odd ? upto : now->behind};
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

    // Row ids of these columns of a query: -1 for a pad and past the width, -2 for what cannot be.
    template <i32 n>
    __device__ void translate(i32 query, const i32 (&column)[n], i32 (&row)[n]) const {
        const i64 start = query * width;
        const i32* given = page_table == nullptr ? rows : positions;
#pragma unroll
        for (i32 i = 0; i < n; i++) row[i] = column[i] < width ? given[start + column[i]] : -1;
        if (page_table == nullptr) return;
        const i32* line = page_table + table_row[query] * table_width;
        const i32 stop = length == nullptr ? kNever : length[query];
        i32 page[n];
#pragma unroll
        for (i32 i = 0; i < n; i++) {
            const i64 at = row[i] / kPageRows;
            const bool inside = row[i] >= 0 && row[i] < stop && at < table_width;
            page[i] = inside ? line[at] : -1;
        }
#pragma unroll
        for (i32 i = 0; i < n; i++) {
            if (column[i] >= width) continue;
            if (row[i] < 0) row[i] = -1;
            else row[i] = page[i] < 0 ? -2 : page[i] * kPageRows + row[i] % kPageRows;
            rows[start + column[i]] = row[i];
        }
    }
};

// The shared memory of a block: a phase finds it as the one before it left it.
struct Desk {
    i32 count[kWarps][kBins];
    i32 start[kBins];
    u32 ages[kAgeMax + 1];
    u32 of_warp[kColumns * kWarps];
};

__device__ __forceinline__ u32 lanes_below() { return (1u << (threadIdx.x % 32)) - 1; }

// Of two votes a thread and column: those of lower columns and, in its own, of lower threads; and
// all.
template <i32 n>
struct Ranks {
    i32 before[n][2];
    i32 total[2];
};

// All threads of the block take part. A block's votes are at most 1,024 for each column, so both
// sums travel in one word.
template <i32 n>
__device__ __forceinline__ Ranks<n> rank_votes(const bool (&first)[n], const bool (&second)[n],
                                               u32* of_warp) {
    u32 votes[n][2], sum = 0;
    const i32 warp = threadIdx.x / 32;
#pragma unroll
    for (i32 i = 0; i < n; i++) {
        votes[i][0] = __ballot_sync(kAllLanes, first[i]);
        votes[i][1] = __ballot_sync(kAllLanes, second[i]);
        const u32 both = __popc(votes[i][0]) | __popc(votes[i][1]) << 16;
        if (threadIdx.x % 32 == 0) of_warp[i * kWarps + warp] = both;
    }
    __syncthreads();
    const u32 below = lanes_below();
    Ranks<n> ranks;
#pragma unroll
    for (i32 i = 0; i < n; i++) {
        u32 before = sum;
#pragma unroll
        for (i32 w = 0; w < kWarps; w++) {
            const u32 votes_of = of_warp[i * kWarps + w];
            before += w < warp ? votes_of : 0;
            sum += votes_of;
        }
        ranks.before[i][0] = i32(before & 0xFFFF) + __popc(votes[i][0] & below);
        ranks.before[i][1] = i32(before >> 16) + __popc(votes[i][1] & below);
    }
    __syncthreads();
    ranks.total[0] = i32(sum & 0xFFFF);
    ranks.total[1] = i32(sum >> 16);
    return ranks;
}

__device__ __forceinline__ i32 count_votes(bool vote, u32* of_warp) {
    const bool votes[1] = {vote}, none[1] = {false};
    return rank_votes(votes, none, of_warp).total[0];
}
