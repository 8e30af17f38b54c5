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
// A new row is on no host yet, so its place has no name. Of such a call only `slots` is written.
//
// A call that warms is warm(), and fill() when it has no ages: a list of distinct rows, cut into
// queries of `width`, of which nothing is said but what was claimed, so there is no serving. A row
// takes its victim only while that is older than itself. Victims are ordered and ages ascend, so
// those that take one are the first few of the missing rows; the least number that was refused is
// how many. Each looks at its own victim alone, which nobody else touches.
//
// When nothing is absent, count to assign return at once and only the selection has been touched.
// A single query, and a single tile in a single block, need no scan: a count is the sum.
//
// The report is zero when a call begins, and all phases see one Landed (resolve.cuh).
#pragma once

#include "victims.cuh"

namespace {

// ---- entries of a query, by kColumns to a thread

using Columns = i32[kColumns];
using Flags = bool[kColumns];

__device__ void columns_from(i32 base, Columns& column) {
#pragma unroll
    for (i32 i = 0; i < kColumns; i++) column[i] = base + i * kThreads + i32(threadIdx.x);
}

// ---- probe

// Marks a slot that was found as used in this step; when it was used before.
__device__ i32 stamp(const Resolve& call, i32 slot, i32 used, i32 step) {
    if (call.purpose == kWrites) {
        call.arena.last_use[slot] = step;
        call.arena.dirty[slot] = 1;
        return step;
    }
    return used == step ? step : atomicExch(&call.arena.last_use[slot], step);
}

// What the mark of a row is whose slot was found, and its age among those of hits.
__device__ i32 mark_of(const Resolve& call, i32 slot, i32 age, i32 ticket, Landed landed,
                       u32* ages) {
    const bool is_landed = landed.has(ticket);
    if (age < 0 || (call.purpose == kWrites && !is_landed)) atomicAdd(&call.report->faults, 1);
    if (call.purpose == kWrites) return slot;
    if (!is_landed) {
        atomicMax(&call.report->late_ticket, ticket);
        return (ticket & 1) ? kBehind : -2 - slot;
    }
    if (age > 0) atomicAdd(&ages[age < kAgeMax ? age : kAgeMax], 1u);
    return slot;
}

// Every kind of load is under way for all columns before the first is looked at.
__device__ void find(const Resolve& call, i32 query, const Columns& column, Landed landed,
                     u32* ages, Columns& mark) {
    const Arena& arena = call.arena;
    const i32 step = call.moment.now->step;
    Columns row, used, ticket;
    call.selection.translate(query, column, row);
#pragma unroll
    for (i32 i = 0; i < kColumns; i++)
        mark[i] = call.selection.names(row[i]) ? load_relaxed(&arena.slot_of[row[i]]) : kNever;
#pragma unroll
    for (i32 i = 0; i < kColumns; i++) {
        if (mark[i] == kNever) mark[i] = kPad;
        else if (mark[i] < 0) mark[i] = kAbsent;
        used[i] = mark[i] >= 0 ? load_relaxed(&arena.last_use[mark[i]]) : step;
        ticket[i] = mark[i] >= 0 ? arena.ticket_of[mark[i]] : 0;
    }
#pragma unroll
    for (i32 i = 0; i < kColumns; i++) {
        if (mark[i] >= 0) used[i] = stamp(call, mark[i], used[i], step);
        if (mark[i] == kAbsent)
            atomicMin(&arena.slot_of[row[i]], kClaim + i32(call.entry(query, column[i])));
        if (mark[i] == kPad && row[i] != kPad) atomicAdd(&call.report->faults, 1);
    }
#pragma unroll
    for (i32 i = 0; i < kColumns; i++)
        if (mark[i] >= 0)
            mark[i] = mark_of(call, mark[i], step - used[i], ticket[i], landed, ages);
}

// The rest of a query's list, and how many it has.
__device__ void end_list(const Resolve& call, i32* lists, i32* counts, i32 query, i32 count) {
    i32* list = lists + call.place_of(query, 0);
    for (i64 i = count + i32(threadIdx.x); i < call.selection.width; i += kThreads) list[i] = -1;
    if (threadIdx.x == 0) counts[query] = count;
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
        const i64 entry = call.entry(query, column);
        absent += count_votes(call.holds(query, column) && restamp(call, entry), desk.of_warp);
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
    const bool sorts = call.purpose == kSelects;
    i32 hits = 0, pending = 0, absent = 0;
    i32* hit = call.hit + call.place_of(query, 0);
    for (i32 base = 0; base < width; base += kColumns * kThreads) {
        Columns column, mark;
        Flags is_hit, is_open;
        columns_from(base, column);
        find(call, query, column, landed, desk.ages, mark);
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            if (column[i] < width) call.slots[call.place_of(query, column[i])] = mark[i];
            is_hit[i] = mark[i] >= 0;
            is_open[i] = mark[i] < kPad;
            absent |= mark[i] == kAbsent;
        }
        const auto ranks = rank_votes(is_hit, is_open, desk.of_warp);
#pragma unroll
        for (i32 i = 0; i < kColumns; i++)
            if (is_hit[i] && sorts) hit[hits + ranks.before[i][0]] = mark[i];
        hits += ranks.total[0];
        pending += ranks.total[1];
    }
    if (__ballot_sync(kAllLanes, absent) != 0 && threadIdx.x % 32 == 0)
        atomicExch(&call.report->absent, 1);
    if (threadIdx.x == 0) call.pending[query] = pending;
    if (threadIdx.x == 0 && hits > 0) atomicAdd(&call.report->hits, hits);
    if (sorts) {
        end_list(call, call.hit, call.hit_count, query, hits);
        if (pending == 0) {
            end_list(call, call.miss, call.miss_count, query, 0);
            end_list(call, call.place, call.place_count, query, 0);
        }
    }
    // Ages are complete: the last votes were counted after the last entry.
    for (i32 i = threadIdx.x; i <= kAgeMax; i += kThreads)
        if (desk.ages[i] > 0) atomicAdd(&call.arena.hit_age[i], u64(desk.ages[i]));
}

// ---- count and scan

// Which of these entries are the first to name an absent row, and which rows they name.
__device__ void name_first(const Resolve& call, i32 query, const Columns& column, Columns& row,
                           Flags& first) {
    const bool lists = call.purpose == kWarms;
    Flags is_open;
#pragma unroll
    for (i32 i = 0; i < kColumns; i++) {
        const bool holds = call.holds(query, column[i]);
        row[i] = holds ? call.selection.rows[call.entry(query, column[i])] : kPad;
        is_open[i] = holds && (lists || call.slots[call.place_of(query, column[i])] == kAbsent);
    }
    Columns holder;
#pragma unroll
    for (i32 i = 0; i < kColumns; i++) {
        const bool is_named = is_open[i] && call.selection.names(row[i]);
        holder[i] = is_named ? load_relaxed(&call.arena.slot_of[row[i]]) : 0;
    }
#pragma unroll
    for (i32 i = 0; i < kColumns; i++)
        first[i] = holder[i] == kClaim + i32(call.entry(query, column[i]));
}

__device__ void count_rows(const Resolve& call, i32 query, Desk& desk) {
    const Flags none = {};
    i32 count = 0;
    if (call.pending[query] > 0)
        for (i32 base = 0; base < call.selection.width; base += kColumns * kThreads) {
            Columns column, row;
            Flags first;
            columns_from(base, column);
            name_first(call, query, column, row, first);
            count += rank_votes(first, none, desk.of_warp).total[0];
        }
    if (threadIdx.x != 0) return;
    const bool alone = call.query_count() == 1;
    call.first_count[query] = alone ? 0 : count;
    if (alone) call.report->missing = count;
}

// Where the rows of each query begin; one warp. A single query has counted them itself.
__device__ void scan_rows(const Resolve& call) {
    const i32 queries = call.query_count();
    if (queries == 1) return;
    const i32 sum = sums_before(call.first_count, queries);
    if (threadIdx.x % 32 == 0) call.report->missing = sum;
}

__device__ void scan(const Resolve& call, i32 warp) {
    if (warp == 0) scan_rows(call);
    else if (warp <= kBins) scan_bin(call, warp - 1);
}

// ---- assign

// Whether a row that warms may take this slot, the i-th victim.
__device__ bool gives_way(const Resolve& call, i32 i, i32 slot, i32 before, i64 entry) {
    if (call.purpose != kWarms || before < 0) return true;
    const i32 age = call.moment.now->step - call.arena.last_use[slot];
    if ((age < kAgeMax ? age : kAgeMax) > call.age(entry)) return true;
    atomicMin(&call.report->claimed, i);
    return false;
}

// What was read ahead for a row that gets a slot.
struct Ahead {
    i32 step, ticket, page;
};

__device__ void hand_over(const Resolve& call, i32 i, i64 entry, i32 row, i32 slot, i32 before,
                          Ahead ahead) {
    const Arena& arena = call.arena;
    if (before >= 0) {
        store_relaxed(&arena.slot_of[before], -1);
        atomicAdd(&call.report->evicted, 1);
    }
    store_relaxed(&arena.slot_of[row], slot);
    arena.row_of[slot] = row;
    arena.last_use[slot] = ahead.step - (call.purpose == kWarms ? call.age(entry) : 0);
    arena.ticket_of[slot] = call.purpose == kWrites ? 0 : ahead.ticket;
    if (call.purpose == kWrites) arena.dirty[slot] = 1;
    else call.claimed_host_rows[i] = call.host_row(row, ahead.page);
}

__device__ void assign(const Resolve& call, i32 query, Desk& desk) {
    if (call.pending[query] == 0) return;
    const Flags none = {};
    const i32 claimed = claim_count(*call.report), step = call.moment.now->step;
    const i32 ticket = call.moment.ticket();
    i32 next = call.first_count[query];
    for (i32 base = 0; base < call.selection.width; base += kColumns * kThreads) {
        Columns column, row, slot, before, page;
        Flags first;
        columns_from(base, column);
        name_first(call, query, column, row, first);
        const auto ranks = rank_votes(first, none, desk.of_warp);
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            const i32 at = next + ranks.before[i][0];
            slot[i] = first[i] && at < claimed ? call.claimed_slots[at] : -1;
        }
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            before[i] = slot[i] < 0 ? -1 : call.arena.row_of[slot[i]];
            page[i] = slot[i] < 0 ? -1 : call.host_page(row[i]);
        }
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            if (!first[i]) continue;
            const i32 at = next + ranks.before[i][0];
            const i64 entry = call.entry(query, column[i]);
            if (slot[i] >= 0 && gives_way(call, at, slot[i], before[i], entry))
                hand_over(call, at, entry, row[i], slot[i], before[i], {step, ticket, page[i]});
            else store_relaxed(&call.arena.slot_of[row[i]], -1);
        }
        next += ranks.total[0];
    }
}

// ---- serve

__device__ void serve(const Resolve& call, i32 query, Desk& desk) {
    if (call.purpose == kWarms || call.pending[query] == 0) return;
    const i64 width = call.selection.width;
    const bool sorts = call.purpose == kSelects;
    i32 *miss = call.miss + call.place_of(query, 0), *place = call.place + call.place_of(query, 0);
    i32 misses = 0, places = 0;
    for (i32 base = 0; base < width; base += kColumns * kThreads) {
        Columns column, mark, row, slot, host;
        Flags is_miss, is_place;
        columns_from(base, column);
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            const bool holds = column[i] < width;
            mark[i] = holds ? call.slots[call.place_of(query, column[i])] : kPad;
            row[i] = holds ? call.selection.rows[call.entry(query, column[i])] : kPad;
        }
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            slot[i] = mark[i] == kAbsent ? call.arena.slot_of[row[i]] : -2 - mark[i];
            if (mark[i] == kBehind) slot[i] = -1;
        }
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            is_miss[i] = mark[i] < kPad && slot[i] >= 0;
            is_place[i] = mark[i] < kPad && slot[i] < 0;
            host[i] = is_place[i] ? call.host_row(row[i], call.host_page(row[i])) : -1;
            if (is_place[i]) slot[i] = host[i] < 0 ? kPad : -2 - host[i];
            if (mark[i] < kPad) call.slots[call.place_of(query, column[i])] = slot[i];
        }
        const auto ranks = rank_votes(is_miss, is_place, desk.of_warp);
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            if (is_miss[i] && sorts) miss[misses + ranks.before[i][0]] = slot[i];
            if (is_place[i] && sorts) place[places + ranks.before[i][1]] = host[i];
        }
        misses += ranks.total[0];
        places += ranks.total[1];
    }
    if (threadIdx.x == 0 && places > 0) atomicAdd(&call.report->places, places);
    if (!sorts) return;
    end_list(call, call.miss, call.miss_count, query, misses);
    end_list(call, call.place, call.place_count, query, places);
}

}  // namespace

#define ESS_PHASE(name) \
    ESS_KERNEL __launch_bounds__(kThreads) name(const __grid_constant__ Resolve call)
