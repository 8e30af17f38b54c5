// The record of a call, and the slots that may give way to it: count and rank of phases.cuh.
#pragma once

#include "resolve.cuh"

namespace {

constexpr i32 kItems = 8;
constexpr i32 kTileSlots = kThreads * kItems;
constexpr i32 kClaim = -2147483647 - 1;
constexpr i32 kAbsent = kClaim;
constexpr i32 kBehind = kClaim + 1;
constexpr i32 kPad = -1;

enum Purpose : i64 { kSelects, kWrites, kWarms };

struct Resolve {
    Arena arena;
    Selection selection;
    Moment moment;
    const i32* queries;
    Report* report;
    i32 *slots, *hit, *miss, *place;
    i32 *hit_count, *miss_count, *place_count;
    i32 *claimed_slots, *claimed_host_rows;
    const i32* host_page_of;
    const u64* stored;
    const i32 *ages, *list_count;
    i32* first_count;
    i32 *bin_count, *bin_total;
    i64 query_first;
    i64 query_max;
    i64 tile_max;
    i64 split_width;
    i64 stored_width;
    i64 layer_count;
    i64 list_max;
    Purpose purpose;

    __device__ i64 entry(i32 query, i32 column) const { return query * selection.width + column; }

    __device__ i64 place_of(i32 query, i32 column) const { return query * split_width + column; }

    __device__ i64 list_size() const {
        return list_count != nullptr && *list_count < list_max ? *list_count : list_max;
    }

    // The step's queries from query_first on are meant, as many as the call has lines for.
    __device__ i32 query_count() const {
        if (purpose == kWarms) return i32((list_size() + selection.width - 1) / selection.width);
        const i64 left = *queries - query_first;
        return i32(left < 0 ? 0 : left < query_max ? left : query_max);
    }

    __device__ bool holds(i32 query, i32 column) const {
        if (column >= selection.width) return false;
        return purpose != kWarms || entry(query, column) < list_size();
    }

    // How long ago a row that warms was used.
    __device__ i32 age(i64 entry) const { return ages == nullptr ? kAgeMax : ages[entry]; }

    // Queries are taken by parts, an entry for each thread of a block: a multiprocessor looks at
    // rows at random no faster than one a cycle, so several share a query.
    __device__ i32 parts_each() const { return (i32(selection.width) + kThreads - 1) / kThreads; }

    __device__ i32 part_count() const { return query_count() * parts_each(); }

    __device__ i32 tile_count() const {
        return (arena.slot_count() + kTileSlots - 1) / kTileSlots;
    }

    __device__ i32 host_page(i32 row) const {
        return host_page_of == nullptr ? -1 : host_page_of[row / kPageRows];
    }

    // Where a row of this page is on the host, -1 if nowhere. New rows are on none.
    __device__ i32 host_row(i32 row, i32 page) const {
        const i32 offset = row % kPageRows;
        if (host_page_of != nullptr && (page < 0 || !was_written(page, offset)))
            atomicAdd(&report->unwritten, 1);
        return page < 0 ? -1 : page * kPageRows + offset;
    }

    __device__ bool was_written(i32 host_page, i32 offset) const {
        for (i64 layer = 0; layer < layer_count; layer++)
            if ((stored[layer * stored_width + host_page] >> offset & 1) == 0) return false;
        return true;
    }
};

// ---- count

// Slots of a group in ascending order; warps take consecutive runs.
__device__ i32 group_slot(i32 tile, i32 item) {
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return tile * kTileSlots + warp * (32 * kItems) + item * 32 + lane;
}

// The slots of a tile that this thread looks at, -1 past the last, and the bin of each: 0 for a
// free slot, then ages downward to 1, or ranks upward; -1 for what must stay.
struct Look {
    i32 slot[kItems];
    i32 bin[kItems];
};

// All loads of a kind are under way before the first is looked at.
__device__ Look look(const Resolve& call, i32 tile) {
    const Arena& arena = call.arena;
    const i32 slots = arena.slot_count(), step = call.moment.now->step;
    const Landed landed = call.moment.landed();
    Look look;
    i32 row[kItems], used[kItems], ticket[kItems];
    bool dirty[kItems];
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        const i32 index = group_slot(tile, item);
        const i32 block = index < slots ? arena.blocks[index / kPageRows] : -1;
        look.slot[item] = block < 0 ? -1 : block + index % kPageRows;
    }
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        const i32 at = look.slot[item];
        row[item] = at < 0 ? -1 : arena.row_of[at];
        used[item] = at < 0 ? 0 : arena.last_use[at];
        ticket[item] = at < 0 ? 0 : arena.ticket_of[at];
        dirty[item] = at < 0 || arena.dirty[at] != 0;
    }
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        const i32 age = step - used[item];
        const bool stays = (age < 1) | dirty[item] | !landed.has(ticket[item]);
        const i32 of_age = kAgeMax + 1 - (age < kAgeMax ? age : kAgeMax);
        look.bin[item] = row[item] < 0 ? 0 : stays ? -1 : of_age;
        if (look.slot[item] < 0) look.bin[item] = -1;
    }
    const bool by_rank = kScored && call.purpose != kWarms;
#pragma unroll
    for (i32 item = 0; kScored && item < kItems; item++)
        if (by_rank & (look.bin[item] > 0)) look.bin[item] = 1 + (arena.rank_of[row[item]] >> 8);
    return look;
}

// How many slots of a tile have each bin, for itself and among all. In which order does not matter
// here, so each is one addition in shared memory, and those of one bin in a warp are one.
__device__ void count_slots(const Resolve& call, i32 tile, const Look& seen, Desk& desk) {
    for_each<kBins>([&](i32 bin) { desk.here[bin] = 0; });
    __syncthreads();
#pragma unroll
    for (i32 item = 0; item < kItems; item++)
        if (seen.bin[item] >= 0) atomicAdd(&desk.here[seen.bin[item]], 1u);
    __syncthreads();
    for_each<kBins>([&](i32 bin) {
        const i32 count = i32(desk.here[bin]);
        call.bin_count[bin * call.tile_max + tile] = count;
        if (count > 0) atomicAdd(&call.bin_total[bin], count);
    });
    __syncthreads();
}

// ---- rank

__device__ i32 claim_count(const Report& report) {
    return report.missing < report.eligible ? report.missing : report.eligible;
}

// How many slots neighbouring bins have among all and in this tile, for each thread.
struct Totals {
    static constexpr i32 kEach = (kBins + kThreads - 1) / kThreads;
    i32 all[kEach], here[kEach];

    __device__ static i32 bin(i32 i) { return i32(threadIdx.x) * kEach + i; }

    __device__ static Totals of(const Resolve& call, i32 tile) {
        Totals totals;
#pragma unroll
        for (i32 i = 0; i < kEach; i++) {
            const bool is = bin(i) < kBins;
            totals.all[i] = is ? call.bin_total[bin(i)] : 0;
            totals.here[i] = is ? call.bin_count[bin(i) * call.tile_max + tile] : 0;
        }
        return totals;
    }
};

// The number of the first slot of each bin among all. Returns how many there are of all bins.
__device__ i32 number_bins(const Totals& totals, Desk& desk) {
    i32 sum = 0;
#pragma unroll
    for (i32 i = 0; i < Totals::kEach; i++) sum += totals.all[i];
    const ThreadSum threads = sum_threads(sum, desk.of_warp);
    i32 next = threads.before;
#pragma unroll
    for (i32 i = 0; i < Totals::kEach; i++) {
        if (Totals::bin(i) < kBins) {
            desk.start[Totals::bin(i)] = next;
            desk.here[Totals::bin(i)] = u32(totals.here[i]);
        }
        next += totals.all[i];
    }
    __syncthreads();
    return threads.total;
}

// How many slots of a bin lower tiles have; one warp.
__device__ i32 in_lower_tiles(const Resolve& call, i32 bin, i32 tile) {
    const i32* count = call.bin_count + bin * call.tile_max;
    i32 lower = 0;
    for (i32 one = threadIdx.x % 32; one < tile; one += 32) lower += count[one];
    return i32(__reduce_add_sync(kAllLanes, u32(lower)));
}

// The number of the first slot of each bin in this tile. Of bins that have slots here and begin
// before the last victim alone, which are few: the lanes of a warp look at every n-th together.
__device__ void number_tile(const Resolve& call, i32 tile, i32 claimed, Desk& desk) {
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (i32 base = 0; base < kBins; base += 32 * kWarps) {
        const i32 own = base + lane * kWarps + warp;
        const bool reaches = own < kBins && desk.here[own] > 0 && desk.start[own] < claimed;
        for (u32 left = __ballot_sync(kAllLanes, reaches); left != 0; left &= left - 1) {
            const i32 first = __popc((left & -left) - 1), bin = base + first * kWarps + warp;
            const i32 lower = in_lower_tiles(call, bin, tile);
            if (lane == first) desk.start[bin] += lower;
        }
    }
    __syncthreads();
}

// Lanes of the warp that count and have this lane's bin, for a lane that counts. A vote for each
// bit: __match_any_sync takes a turn for each bin that there is.
__device__ u32 peers_of(bool counts, i32 bin) {
    u32 peers = __ballot_sync(kAllLanes, counts);
#pragma unroll
    for (i32 bit = 1; bit < kBins; bit *= 2) {
        const u32 with = __ballot_sync(kAllLanes, (bin & bit) != 0);
        peers &= (bin & bit) ? with : ~with;
    }
    return peers;
}

// Adds the lanes that count to their warp's counts; the number of earlier ones of the same bin.
__device__ i32 tally(i32* count, bool counts, i32 bin) {
    const u32 peers = peers_of(counts, bin), below = peers & lanes_below();
    const i32 before = counts ? count[bin] : 0;
    __syncwarp();
    if (counts && below == 0) count[bin] = before + __popc(peers);
    __syncwarp();
    return before + __popc(below);
}

// The number of the first slot of each bin and warp, in place of its count.
__device__ void number_warps(i32 claimed, Desk& desk) {
    for_each<kBins>([&](i32 bin) {
        i32 next = desk.start[bin], own[kWarps];
        if (next >= claimed) return;
#pragma unroll
        for (i32 w = 0; w < kWarps; w++) own[w] = desk.count[w][bin];
#pragma unroll
        for (i32 w = 0; w < kWarps; w++) {
            desk.count[w][bin] = next;
            next += own[w];
        }
    });
    __syncthreads();
}

// The slots of a tile that have a place below `claimed` take it. Only those of bins that begin
// there can, and most warps have none: only theirs are put in order.
__device__ void take_places(const Resolve& call, const Look& seen, i32 claimed, Desk& desk) {
    i32* count = desk.count[threadIdx.x / 32];
    i32 earlier[kItems];
    bool any = false;
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        const i32 bin = seen.bin[item];
        const bool counts = bin >= 0 && desk.start[bin] < claimed;
        earlier[item] = -1;
        if (__ballot_sync(kAllLanes, counts) == 0) continue;
        const i32 before = tally(count, counts, bin);
        if (counts) earlier[item] = before;
        any = true;
    }
    if (__syncthreads_count(any) == 0) return;
    number_warps(claimed, desk);
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        if (earlier[item] < 0) continue;
        const i32 place = count[seen.bin[item]] + earlier[item];
        if (place < claimed) call.claimed_slots[place] = seen.slot[item];
    }
}

// `totals` and `missing` are parameters so that a caller can load them before it looks.
__device__ void rank(const Resolve& call, i32 tile, const Totals& totals, i32 missing,
                     const Look& seen, Desk& desk) {
    for_each<kWarps * kBins>([&](i32 i) { (&desk.count[0][0])[i] = 0; });
    const i32 eligible = number_bins(totals, desk);
    const i32 claimed = missing < eligible ? missing : eligible;
    number_tile(call, tile, claimed, desk);
    take_places(call, seen, claimed, desk);
    if (tile == 0 && threadIdx.x == 0) {
        call.report->eligible = eligible;
        call.report->claimed = claimed;
    }
    __syncthreads();
}

// By a block that has one tile, or none.
__device__ void rank_tile(const Resolve& call, i32 tile, Desk& desk) {
    const i32 tiles = call.tile_count();
    if (call.report->absent == 0 || tile >= tiles) return;
    const Totals totals = Totals::of(call, tile);
    const i32 missing = call.report->missing;
    rank(call, tile, totals, missing, look(call, tile), desk);
}

}  // namespace
