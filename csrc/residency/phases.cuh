// The device twin of plan() in ess/pool/lru.py: the same arrays, the same bits, no sort, no host.
//
// A call runs in phases; each ends for all blocks before the next begins. A block takes one query
// or one tile of slots.
//
//   probe   every entry: hit, late, pad, or absent. Hits and late rows are stamped. An absent row
//           is claimed in the map itself, by atomicMin with kClaim + entry: below every slot and
//           below -1, so the least entry, which is the first in the order of the specification,
//           stays, whatever the order of the threads.
//   count   how many absent rows each query is the first to name; how many slots of each tile may
//           give way, by age. All stamps are in place, so what this step selected has age 0.
//   scan    where the rows of a query and the ages of a tile begin, among all.
//   rank    the place of each slot in the order (age descending, slot ascending) is the number of
//           older ones, plus those of its age in lower tiles, warps and lanes. It is the victim of
//           the missing row with that number.
//   assign  the i-th missing row takes the i-th victim; a row for which there is none takes its
//           claim back, which leaves -1.
//   serve   what was not a hit looks into the map again: a slot, its own or its twin's, is a miss;
//           none is served in place, by its host row, and so is a row that a landing still brings:
//           a step waits for the copies of steps alone.
//
// Nothing that a phase reads and that blocks of the same phase write can change its result: probes
// only lower values that are negative anyway, and an assignment writes the cells of rows that it is
// first for and of rows that give way, which nobody selected. Ages that two queries see at once are
// counted by the one whose exchange came first. So a result does not depend on the schedule. Words
// that blocks of a phase both read and write are touched by atomic and relaxed operations alone:
// the map in probe and assign (a list may name a row that gives way: no claim before, none after),
// and the stamps in probe.
//
// A call that writes is claim_new(): its rows are distinct and about to be written by the step,
// so their slots are dirty at once and nothing is in flight. The specification changes nothing when
// there is no room for all; here the ledger has promised room, and what finds none shows as places.
// A new row is on no host yet, so its place has no name.
//
// A call that warms is warm(), and fill() when it has no ages: a list of distinct rows, cut into
// queries of `width`, of which nothing is said but what was claimed, so there is no serving. A row
// takes its victim only while that is older than itself. Victims are ordered and ages ascend, so
// those that take one are the first few of the missing rows; the least number that was refused is
// how many. Each looks at its own victim alone, which nobody else touches.
//
// When nothing is absent, count to assign return at once and only the selection has been touched.
// Where there is a single tile, or a single query, nothing is to be scanned: its count is the sum.
//
// The report is zero when a call begins, and all phases see one Landed (resolve.cuh).
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

    // Where a row is on the host, -1 if nowhere.
    __device__ i32 host_row(i32 row) const {
        if (host_page_of == nullptr) return -1;
        const i32 page = host_page_of[row / kPageRows], offset = row % kPageRows;
        if (page < 0 || !was_written(page, offset)) atomicAdd(&report->unwritten, 1);
        return page < 0 ? -1 : page * kPageRows + offset;
    }

    __device__ bool was_written(i32 host_page, i32 offset) const {
        for (i64 layer = 0; layer < layer_count; layer++)
            if ((stored[layer * stored_width + host_page] >> offset & 1) == 0) return false;
        return true;
    }
};

// ---- probe

__device__ i32 find(const Resolve& call, i32 query, i32 column, Landed landed, u32* ages) {
    const Arena& arena = call.arena;
    const i32 row = call.selection.translate(query, column), step = call.moment.now->step;
    if (!call.selection.names(row)) {
        if (row != kPad) atomicAdd(&call.report->faults, 1);
        return kPad;
    }
    const i32 slot = load_relaxed(&arena.slot_of[row]);
    if (slot < 0) {
        atomicMin(&arena.slot_of[row], kClaim + i32(call.entry(query, column)));
        return kAbsent;
    }
    i32 used = load_relaxed(&arena.last_use[slot]);
    const i32 ticket = arena.ticket_of[slot];
    if (call.purpose == kWrites) {
        if (!landed.has(ticket)) atomicAdd(&call.report->faults, 1);
        arena.last_use[slot] = step;
        arena.dirty[slot] = 1;
        return slot;
    }
    if (used != step) used = atomicExch(&arena.last_use[slot], step);
    if (used > step) atomicAdd(&call.report->faults, 1);
    if (!landed.has(ticket)) {
        atomicMax(&call.report->late_ticket, ticket);
        return (ticket & 1) ? kBehind : -2 - slot;
    }
    const i32 age = step - used;
    if (age > 0) atomicAdd(&ages[age < kAgeMax ? age : kAgeMax], 1u);
    return slot;
}

__device__ void fill(i32* list, i32 from, i64 width) {
    for (i64 i = from + i32(threadIdx.x); i < width; i += kThreads) list[i] = -1;
}

// A row of a list as if used `age` steps ago. Whether it is absent.
__device__ bool restamp(const Resolve& call, i64 entry) {
    const Arena& arena = call.arena;
    const i32 row = call.selection.rows[entry], age = call.age(entry);
    if (!call.selection.names(row) || age < (entry > 0 ? call.age(entry - 1) : 1)) {
        atomicAdd(&call.report->faults, 1);
        return false;
    }
    const i32 slot = arena.slot_of[row], used = call.moment.now->step - age;
    if (slot < 0) atomicMin(&arena.slot_of[row], kClaim + i32(entry));
    else if (arena.last_use[slot] < used) arena.last_use[slot] = used;
    return slot < 0;
}

__device__ void probe_list(const Resolve& call, i32 query, Desk& desk) {
    i32 absent = 0;
    for (i32 base = 0; base < call.selection.width; base += kThreads) {
        const i32 column = base + i32(threadIdx.x);
        const bool one = call.holds(query, column) && restamp(call, call.entry(query, column));
        absent += rank_votes(one, false, desk.of_warp).total[0];
    }
    if (threadIdx.x != 0) return;
    call.pending[query] = absent;
    if (absent > 0) atomicExch(&call.report->absent, 1);
}

__device__ void probe(const Resolve& call, i32 query, Desk& desk) {
    if (call.purpose == kWarms) return probe_list(call, query, desk);
    for (i32 i = threadIdx.x; i <= kAgeMax; i += kThreads) desk.ages[i] = 0;
    __syncthreads();
    const Landed landed = call.moment.landed();
    const i64 width = call.selection.width;
    i32 hits = 0, pending = 0, absent = 0;
    i32* hit = call.hit + call.place_of(query, 0);
    for (i32 base = 0; base < width; base += kThreads) {
        const i32 column = base + i32(threadIdx.x);
        i32 mark = kPad;
        if (column < width) {
            mark = find(call, query, column, landed, desk.ages);
            call.slots[call.place_of(query, column)] = mark;
        }
        const Ranks ranks = rank_votes(mark >= 0, mark < kPad, desk.of_warp);
        if (mark >= 0) hit[hits + ranks.before[0]] = mark;
        hits += ranks.total[0];
        pending += ranks.total[1];
        absent |= mark == kAbsent;
    }
    fill(hit, hits, width);
    if (__ballot_sync(kAllLanes, absent) != 0 && threadIdx.x % 32 == 0)
        atomicExch(&call.report->absent, 1);
    if (threadIdx.x == 0) {
        call.hit_count[query] = hits;
        call.pending[query] = pending;
        if (hits > 0) atomicAdd(&call.report->hits, hits);
    }
    if (pending == 0) {
        fill(call.miss + call.place_of(query, 0), 0, width);
        fill(call.place + call.place_of(query, 0), 0, width);
        if (threadIdx.x == 0) call.miss_count[query] = call.place_count[query] = 0;
    }
    // Ages are complete: the last votes were counted after the last entry.
    for (i32 i = threadIdx.x; i <= kAgeMax; i += kThreads)
        if (desk.ages[i] > 0) atomicAdd(&call.arena.hit_age[i], u64(desk.ages[i]));
}

// ---- count

__device__ bool names_first(const Resolve& call, i32 query, i32 column) {
    if (!call.holds(query, column)) return false;
    const bool lists = call.purpose == kWarms;
    if (!lists && call.slots[call.place_of(query, column)] != kAbsent) return false;
    const i64 entry = call.entry(query, column);
    const i32 row = call.selection.rows[entry];
    if (!call.selection.names(row)) return false;
    return load_relaxed(&call.arena.slot_of[row]) == kClaim + i32(entry);
}

__device__ void count_rows(const Resolve& call, i32 query, Desk& desk) {
    i32 count = 0;
    if (call.pending[query] > 0)
        for (i32 base = 0; base < call.selection.width; base += kThreads) {
            const bool first = names_first(call, query, base + i32(threadIdx.x));
            count += rank_votes(first, false, desk.of_warp).total[0];
        }
    if (threadIdx.x != 0) return;
    const bool alone = call.query_count() == 1;
    call.first_count[query] = alone ? 0 : count;
    if (alone) call.report->missing = count;
}

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

__device__ void sum_up(const Resolve& call, i32 bin, i32 sum) {
    call.bin_total[bin] = sum;
    if (sum > 0) atomicAdd(&call.report->eligible, sum);
}

__device__ void count_slots(const Resolve& call, i32 tile, Desk& desk) {
    clear_counts(desk);
    const Look seen = look(call, tile);
#pragma unroll
    for (i32 item = 0; item < kItems; item++) tally(desk.count[threadIdx.x / 32], seen.bin[item]);
    __syncthreads();
    const bool alone = call.tile_count() == 1;
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads) {
        i32 total = 0;
#pragma unroll
        for (i32 w = 0; w < kWarps; w++) total += desk.count[w][bin];
        call.bin_count[bin * call.tile_max + tile] = alone ? 0 : total;
        if (alone) sum_up(call, bin, total);
    }
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

// Warp 0 takes the rows of the queries, warp 1 + bin the tiles of a bin.
__device__ void scan(const Resolve& call, i32 warp) {
    const bool rows = warp == 0;
    const i32 n = rows ? call.query_count() : call.tile_count();
    if (warp > kBins || n == 1) return;
    const i32 sum = sums_before(
        rows ? call.first_count : call.bin_count + (warp - 1) * call.tile_max, n);
    if (threadIdx.x % 32 != 0) return;
    if (rows) call.report->missing = sum;
    else sum_up(call, warp - 1, sum);
}

// ---- rank

__device__ i32 claim_count(const Report& report) {
    return report.missing < report.eligible ? report.missing : report.eligible;
}

// The number of the first slot of each bin and warp, in place of its count.
__device__ void number(const Resolve& call, i32 tile, Desk& desk) {
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads) {
        i32 next = desk.start[bin] + call.bin_count[bin * call.tile_max + tile];
#pragma unroll
        for (i32 w = 0; w < kWarps; w++) {
            const i32 own = desk.count[w][bin];
            desk.count[w][bin] = next;
            next += own;
        }
    }
    __syncthreads();
}

__device__ void rank(const Resolve& call, i32 tile, Desk& desk) {
    clear_counts(desk);
    for (i32 bin = threadIdx.x; bin < kBins; bin += kThreads) desk.start[bin] = call.bin_total[bin];
    __syncthreads();
    if (threadIdx.x < 32) sums_before(desk.start, kBins);
    const Look seen = look(call, tile);
    i32 earlier[kItems];
    const i32 warp = threadIdx.x / 32;
#pragma unroll
    for (i32 item = 0; item < kItems; item++)
        earlier[item] = tally(desk.count[warp], seen.bin[item]);
    __syncthreads();
    number(call, tile, desk);
    const i32 claimed = claim_count(*call.report);
#pragma unroll
    for (i32 item = 0; item < kItems; item++) {
        if (seen.bin[item] < 0) continue;
        const i32 place = desk.count[warp][seen.bin[item]] + earlier[item];
        if (place < claimed) call.claimed_slots[place] = seen.slot[item];
    }
    if (tile == 0 && threadIdx.x == 0) call.report->claimed = claimed;
    __syncthreads();
}

// ---- assign

__device__ bool gives_way(const Resolve& call, i32 i, i64 entry) {
    if (call.purpose != kWarms) return true;
    const i32 slot = call.claimed_slots[i];
    const i32 age = call.moment.now->step - call.arena.last_use[slot];
    if (call.arena.row_of[slot] < 0) return true;
    if ((age < kAgeMax ? age : kAgeMax) > call.age(entry)) return true;
    atomicMin(&call.report->claimed, i);
    return false;
}

__device__ void hand_over(const Resolve& call, i32 i, i64 entry) {
    const Arena& arena = call.arena;
    const i32 row = call.selection.rows[entry];
    const i32 slot = call.claimed_slots[i], before = arena.row_of[slot];
    if (before >= 0) {
        store_relaxed(&arena.slot_of[before], -1);
        atomicAdd(&call.report->evicted, 1);
    }
    store_relaxed(&arena.slot_of[row], slot);
    arena.row_of[slot] = row;
    arena.last_use[slot] = call.moment.now->step - (call.purpose == kWarms ? call.age(entry) : 0);
    arena.ticket_of[slot] = call.purpose == kWrites ? 0 : call.moment.ticket();
    if (call.purpose == kWrites) arena.dirty[slot] = 1;
    else call.claimed_host_rows[i] = call.host_row(row);
}

__device__ void assign(const Resolve& call, i32 query, Desk& desk) {
    if (call.pending[query] == 0) return;
    const i32 claimed = claim_count(*call.report);
    i32 next = call.first_count[query];
    for (i32 base = 0; base < call.selection.width; base += kThreads) {
        const i32 column = base + i32(threadIdx.x);
        const bool first = names_first(call, query, column);
        const Ranks ranks = rank_votes(first, false, desk.of_warp);
        if (first) {
            const i64 entry = call.entry(query, column);
            const i32 i = next + ranks.before[0];
            if (i < claimed && gives_way(call, i, entry)) hand_over(call, i, entry);
            else store_relaxed(&call.arena.slot_of[call.selection.rows[entry]], -1);
        }
        next += ranks.total[0];
    }
}

// ---- serve

__device__ void serve(const Resolve& call, i32 query, Desk& desk) {
    if (call.purpose == kWarms || call.pending[query] == 0) return;
    const i64 width = call.selection.width;
    i32 *miss = call.miss + call.place_of(query, 0), *place = call.place + call.place_of(query, 0);
    i32 misses = 0, places = 0;
    for (i32 base = 0; base < width; base += kThreads) {
        const i32 column = base + i32(threadIdx.x);
        i32 *mark = call.slots + call.place_of(query, column), slot = -1, host = -1;
        const bool open = column < width && *mark < kPad;
        if (open) {
            const i32 row = call.selection.rows[call.entry(query, column)];
            if (*mark == kAbsent) slot = call.arena.slot_of[row];
            else if (*mark != kBehind) slot = -2 - *mark;
            if (slot < 0) host = call.host_row(row);
            *mark = slot >= 0 ? slot : host >= 0 ? -2 - host : kPad;
        }
        const Ranks ranks = rank_votes(open && slot >= 0, open && slot < 0, desk.of_warp);
        if (open && slot >= 0) miss[misses + ranks.before[0]] = slot;
        if (open && slot < 0) place[places + ranks.before[1]] = host;
        misses += ranks.total[0];
        places += ranks.total[1];
    }
    fill(miss, misses, width);
    fill(place, places, width);
    if (threadIdx.x == 0) {
        call.miss_count[query] = misses;
        call.place_count[query] = places;
        if (places > 0) atomicAdd(&call.report->places, places);
    }
}

}  // namespace

#define ESS_PHASE(name) \
    ESS_KERNEL __launch_bounds__(kThreads) name(const __grid_constant__ Resolve call)
