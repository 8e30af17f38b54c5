// The record of a call, and the slots that may give way to it: count, scan and rank of phases.cuh.
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
    i32 *pending, *first_count;
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

    // Of a step's queries those from query_first on, as many as the call has lines for.
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
// free slot, then ages downward to 1; -1 for what must stay.
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
    return look;
}

// Adds a warp's lanes to its counts; the number of earlier ones of the same bin.
__device__ i32 tally(i32* count, i32 bin) {
    const u32 peers = __match_any_sync(kAllLanes, bin), below = peers & lanes_below();
    const i32 before = bin >= 0 ? count[bin] : 0;
    __syncwarp();
    if (bin >= 0 && below == 0) count[bin] = before + __popc(peers);
    __syncwarp();
    return before + __popc(below);
}

__device__ void clear_counts(Desk& desk) {
    for (i32 i = threadIdx.x; i < kWarps * kBins; i += kThreads) (&desk.count[0][0])[i] = 0;
    __syncthreads();
}

__device__ i32 total_of(const Desk& desk, i32 bin) {
    i32 total = 0;
#pragma unroll
    for (i32 w = 0; w < kWarps; w++) total += desk.count[w][bin];
    return total;
}

__device__ void count_slots(const Resolve& call, i32 tile, Desk& desk) {
    clear_counts(desk);
    const Look seen = look(call, tile);
#pragma unroll
    for (i32 item = 0; item < kItems; item++) tally(desk.count[threadIdx.x / 32], seen.bin[item]);
    __syncthreads();
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads)
        call.bin_count[bin * call.tile_max + tile] = total_of(desk, bin);
    __syncthreads();
}

// ---- scan

// Replaces n numbers by the sums before them; one warp. Returns the sum of all.
__device__ i32 sums_before(i32* numbers, i32 n) {
    const i32 lane = threadIdx.x % 32;
    i32 sum = 0;
    for (i32 base = 0; base < n; base += 32) {
        const i32 own = base + lane < n ? numbers[base + lane] : 0;
        i32 upto = own;
#pragma unroll
        for (i32 by = 1; by < 32; by *= 2) {
            const i32 other = __shfl_up_sync(kAllLanes, upto, by);
            if (lane >= by) upto += other;
        }
        if (base + lane < n) numbers[base + lane] = sum + upto - own;
        sum += __shfl_sync(kAllLanes, upto, 31);
    }
    return sum;
}

// Where the slots of a bin begin in each tile; one warp.
__device__ void scan_bin(const Resolve& call, i32 bin) {
    const i32 sum = sums_before(call.bin_count + bin * call.tile_max, call.tile_count());
    if (threadIdx.x % 32 != 0) return;
    call.bin_total[bin] = sum;
    if (sum > 0) atomicAdd(&call.report->eligible, sum);
}

// ---- rank

__device__ i32 claim_count(const Report& report) {
    return report.missing < report.eligible ? report.missing : report.eligible;
}

// The slots of a tile, and of each its bin and how many earlier ones of its warp have the same:
// bin * 2^16 + earlier, or -1 for what must stay.
struct Order {
    i32 slot[kItems];
    i32 code[kItems];
};

__device__ Order order_of(const Resolve& call, i32 tile, Desk& desk) {
    Order order;
    const Look seen = look(call, tile);
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        const i32 earlier = tally(desk.count[threadIdx.x / 32], seen.bin[item]);
        order.slot[item] = seen.slot[item];
        order.code[item] = seen.bin[item] < 0 ? -1 : seen.bin[item] << 16 | earlier;
    }
    return order;
}

// The number of the first slot of each bin and warp, in place of its count. `before` has how many
// slots of a bin are in lower tiles, a number for each tile; null for none.
__device__ void number(Desk& desk, const i32* before, i64 tile_max) {
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads) {
        i32 next = desk.start[bin] + (before == nullptr ? 0 : before[bin * tile_max]);
#pragma unroll
        for (i32 w = 0; w < kWarps; w++) {
            const i32 own = desk.count[w][bin];
            desk.count[w][bin] = next;
            next += own;
        }
    }
    __syncthreads();
}

__device__ void take(const Resolve& call, const Order& order, i32 claimed, const Desk& desk) {
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        const i32 code = order.code[item];
        if (code < 0) continue;
        const i32 place = desk.count[threadIdx.x / 32][code >> 16] + (code & 0xFFFF);
        if (place < claimed) call.claimed_slots[place] = order.slot[item];
    }
}

__device__ void rank(const Resolve& call, i32 tile, Desk& desk) {
    clear_counts(desk);
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads) desk.start[bin] = call.bin_total[bin];
    __syncthreads();
    if (threadIdx.x < 32) sums_before(desk.start, kBins);
    const Order order = order_of(call, tile, desk);
    __syncthreads();
    number(desk, call.bin_count + tile, call.tile_max);
    const i32 claimed = claim_count(*call.report);
    take(call, order, claimed, desk);
    if (tile == 0 && threadIdx.x == 0) call.report->claimed = claimed;
    __syncthreads();
}

// Count, scan and rank of a tile that is the only one: its slots are looked at once, and what is
// counted never leaves the block.
__device__ void rank_alone(const Resolve& call, Desk& desk) {
    clear_counts(desk);
    const Order order = order_of(call, 0, desk);
    __syncthreads();
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads) desk.start[bin] = total_of(desk, bin);
    __syncthreads();
    if (threadIdx.x < 32) {
        const i32 sum = sums_before(desk.start, kBins);
        if (threadIdx.x == 0) call.report->eligible = sum;
    }
    __syncthreads();
    number(desk, nullptr, 0);
    const i32 claimed = claim_count(*call.report);
    take(call, order, claimed, desk);
    if (threadIdx.x == 0) call.report->claimed = claimed;
}

}  // namespace
