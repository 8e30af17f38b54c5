// What the residency kernels share: the arena, the record of a call, counts over a block.
#pragma once

#include "device.cuh"

constexpr i32 kThreads = ESS_THREADS;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kPageRows = 64;
constexpr i32 kAgeMax = 255;

// Under score rows give way by the upper 8 bits of their rank, behind all free slots.
#ifdef ESS_SCORED
constexpr bool kScored = true;
#else
constexpr bool kScored = false;
#endif
constexpr i32 kBins = kScored ? 257 : 256;
constexpr u32 kAllLanes = ~0u;
constexpr i32 kNever = 2147483647;
static_assert(kThreads % 32 == 0, "blocks are whole warps");

// Entries of a query that a thread looks at together, a block apart, so that their loads are under
// way at once: what the top 2,048 take in one turn of 512 threads.
constexpr i32 kColumns = 4;

// Words that each warp of a block can give at a time.
constexpr i32 kWordsMax = 2 * kColumns;

// The arrays of ess/pool/lru/arena.py, on the device. How many blocks a group owns changes with its
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
    u16* rank_of;

    // A row id that leaves is no longer the row that was scored.
    __device__ void forget(i32 row) const {
        if (rank_of != nullptr) rank_of[row] = 0;
    }

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
// The number is not written while kernels read it, or two phases of a call could see two of them: a
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

    // All three are loaded before the first is looked at: one round trip.
    __device__ Landed landed() const {
        const i32 begun = now->ticket, even = now->landed, odd = now->behind;
        const i32 upto = begun + 2 * i32(waited);
        const bool is_odd = begun & 1, tells = waited > 0;
        return {tells && !is_odd ? upto : even, tells && is_odd ? upto : odd};
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
    // A query that is not `there` has a line all the same, of which nothing is known: it is read
    // before that is known, in one round trip with what tells.
    template <i32 n>
    __device__ void translate(i32 query, const i32 (&column)[n], bool there, i32 (&row)[n]) const {
        const i64 start = query * width;
        const i32* given = page_table == nullptr ? rows : positions;
        const i32 of_table = page_table == nullptr ? 0 : table_row[query];
        const i32 stop = length == nullptr ? kNever : length[query];
#pragma unroll
        for (i32 i = 0; i < n; i++) row[i] = column[i] < width ? given[start + column[i]] : -1;
#pragma unroll
        for (i32 i = 0; i < n; i++) row[i] = there ? row[i] : -1;
        if (!there || page_table == nullptr) return;
        const i32* line = page_table + of_table * table_width;
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

// The shared memory of a block: a phase finds it as the one before it left it. `here` is what the
// block has, by age: hits of a part, or slots of a tile.
struct Desk {
    i32 count[kWarps][kBins];
    i32 start[kBins];
    u32 here[kBins];
    u32 of_warp[kWordsMax * kWarps];
};

// All i below n, by the threads of a block. How many turns that takes, the compiler knows.
template <i32 n, typename Do>
__device__ __forceinline__ void for_each(Do one) {
#pragma unroll
    for (i32 base = 0; base < n; base += kThreads) {
        const i32 i = base + i32(threadIdx.x);
        if (n % kThreads == 0 || i < n) one(i);
    }
}

__device__ __forceinline__ u32 lanes_below() { return (1u << (threadIdx.x % 32)) - 1; }

// Each warp has given a word. The sum of the words of lower warps, and of all. Each lane looks at
// one, and the warp adds them up in one instruction: to look at all of them in turn took more of a
// call's time than its memory did.
struct WarpSum {
    u32 before, total;
};

__device__ __forceinline__ WarpSum sum_warps(const u32* of_warp) {
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 given = lane < kWarps ? of_warp[lane] : 0;
    return {__reduce_add_sync(kAllLanes, lane < warp ? given : 0),
            __reduce_add_sync(kAllLanes, given)};
}

// Each thread votes in m columns. The votes in lower columns and, in its own column, of lower
// threads; and all votes.
template <i32 n, i32 m>
struct Ranks {
    i32 before[n][m];
    i32 total[m];
};

// All threads of the block take part. A block's votes are at most 1,024 for each column, so two
// sums travel in one word.
template <i32 n, i32 m>
__device__ __forceinline__ Ranks<n, m> rank_votes(const bool (&vote)[n][m], u32* of_warp) {
    constexpr i32 kWords = (m + 1) / 2;
    static_assert(n * kWords <= kWordsMax, "there is room for the votes");
    const i32 warp = threadIdx.x / 32;
    u32 votes[n][m];
#pragma unroll
    for (i32 i = 0; i < n; i++) {
        u32 words[kWords] = {};
#pragma unroll
        for (i32 j = 0; j < m; j++) {
            votes[i][j] = __ballot_sync(kAllLanes, vote[i][j]);
            words[j / 2] |= u32(__popc(votes[i][j])) << (j % 2 * 16);
        }
#pragma unroll
        for (i32 j = 0; j < kWords; j++)
            if (threadIdx.x % 32 == 0) of_warp[(i * kWords + j) * kWarps + warp] = words[j];
    }
    __syncthreads();
    Ranks<n, m> ranks = {};
#pragma unroll
    for (i32 i = 0; i < n; i++) {
#pragma unroll
        for (i32 word = 0; word < kWords; word++) {
            const WarpSum sum = sum_warps(of_warp + (i * kWords + word) * kWarps);
#pragma unroll
            for (i32 j = 2 * word; j < m && j < 2 * word + 2; j++) {
                const i32 shift = j % 2 * 16;
                const i32 lower = i32(sum.before >> shift & 0xFFFF);
                ranks.before[i][j] = ranks.total[j] + lower + __popc(votes[i][j] & lanes_below());
                ranks.total[j] += i32(sum.total >> shift & 0xFFFF);
            }
        }
    }
    __syncthreads();
    return ranks;
}

// Each thread gives a number. The sum of the numbers of lower threads, and of all.
struct ThreadSum {
    i32 before, total;
};

__device__ __forceinline__ ThreadSum sum_threads(i32 own, u32* of_warp) {
    const i32 lane = threadIdx.x % 32;
    i32 upto = own;
#pragma unroll
    for (i32 by = 1; by < 32; by *= 2) {
        const i32 other = __shfl_up_sync(kAllLanes, upto, by);
        if (lane >= by) upto += other;
    }
    if (lane == 31) of_warp[threadIdx.x / 32] = upto;
    __syncthreads();
    const WarpSum sum = sum_warps(of_warp);
    __syncthreads();
    return {i32(sum.before) + upto - own, i32(sum.total)};
}
