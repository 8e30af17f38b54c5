// The device twin of plan() in ess/pool/lru/specification.py: the same arrays, the same bits, with
// no sort and no host.
//
// A call runs in phases; each ends for all blocks before the next begins. A block takes a part of a
// query, as many entries as it has threads, or a tile of slots; in serve it takes a whole query.
//
//   probe   every entry: hit, late, pad, or absent. Hits and late rows are stamped. An absent row
//           is claimed in the map itself, by atomicMin with kClaim + entry: below every slot and
//           below -1, so the least entry, which is the first in the order of the specification,
//           stays, whatever the order of the threads.
//   count   how many absent rows each part is the first to name; how many slots of each tile may
//           give way, by age. All stamps are in place, so what this step selected has age 0.
//           Under score a rank takes the place of an age, but in a call that warms.
//   rank    the place of each slot in the order (age descending, slot ascending) is the number of
//           older ones, plus those of its age in lower tiles, warps and lanes. It is the victim of
//           the missing row with that number.
//   assign  the i-th missing row takes the i-th victim; a row for which there is none takes its
//           claim back, which leaves -1.
//   serve   the lists of hits, of misses, and of what is served in place. What was not a hit looks
//           into the map again: a slot, its own or its twin's, is a miss; none is served in place,
//           by its host row, and so is a row that a landing still brings: a step waits for the
//           copies of steps alone.
//
// Nothing that a phase reads and that blocks of the same phase write can change its result: probes
// only lower values that are negative anyway, and an assignment writes the cells of rows that it is
// first for and of rows that give way, which no query selected. Ages that two queries see at once
// are counted by the one whose exchange came first. So a result does not depend on the schedule.
// Words that blocks of a phase both read and write are touched by atomic and relaxed operations
// alone: the map in probe and assign (a list may name a row that gives way: no claim before, none
// after), and the stamps in probe.
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
// how many. Each looks at its own victim alone, which no other row touches.
//
// When nothing is absent, count to assign return at once and only the selection has been touched.
//
// The report is zero when a call begins, and all phases see one Landed (resolve.cuh).
#pragma once

#include "victims.cuh"

namespace {

// ---- entries of a part, one to a thread

struct Entry {
    i32 query, column;

    __device__ static Entry of(const Resolve& call, i32 part) {
        const i32 each = call.parts_each(), query = part / each;
        return {query, (part - query * each) * kThreads + i32(threadIdx.x)};
    }
};

// ---- probe

// Stamps the slot of a row with this step; returns the step of its last use before, but this step
// where the call writes.
__device__ i32 stamp(const Resolve& call, i32 slot, i32 step) {
    if (call.purpose != kWrites) return atomicExch(&call.arena.last_use[slot], step);
    call.arena.last_use[slot] = step;
    call.arena.dirty[slot] = 1;
    return step;
}

// The mark of a row that has a slot; counts the row's age if it is a hit.
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

// The mark of an entry, by its row. The exchange of the stamp and the ticket are one round trip.
__device__ i32 find(const Resolve& call, Entry at, i32 row, i32 step, Landed landed, u32* ages) {
    const Arena& arena = call.arena;
    if (!call.selection.names(row)) {
        if (row != kPad) atomicAdd(&call.report->faults, 1);
        return kPad;
    }
    const i32 slot = load_relaxed(&arena.slot_of[row]);
    if (slot < 0) {
        atomicMin(&arena.slot_of[row], kClaim + i32(call.entry(at.query, at.column)));
        return kAbsent;
    }
    const i32 ticket = arena.ticket_of[slot], used = stamp(call, slot, step);
    return mark_of(call, slot, step - used, ticket, landed, ages);
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

// Marks the entries of a part; whether this thread's is absent.
__device__ bool mark(const Resolve& call, Entry at, Desk& desk) {
    const i32 step = call.moment.now->step;
    const Landed landed = call.moment.landed();
    const i32 column[1] = {at.column};
    const bool there = at.query < call.query_count();
    i32 row[1];
    call.selection.translate(at.query, column, there, row);
    if (!there || at.column >= call.selection.width) return false;
    const i32 mark = find(call, at, row[0], step, landed, desk.here);
    call.slots[call.place_of(at.query, at.column)] = mark;
    return mark == kAbsent;
}

__device__ void probe(const Resolve& call, i32 part, Desk& desk) {
    const Entry at = Entry::of(call, part);
    const bool is_list = call.purpose == kWarms;
    for_each<kBins>([&](i32 i) {
        desk.here[i] = 0;
        if (part == 0) call.bin_total[i] = 0;
    });
    __syncthreads();
    const bool absent = !is_list ? mark(call, at, desk)
                                 : call.holds(at.query, at.column) &&
                                       restamp(call, call.entry(at.query, at.column));
    const i32 absent_count = __syncthreads_count(absent);
    if (threadIdx.x == 0 && absent_count > 0) atomicExch(&call.report->absent, 1);
    for_each<kBins>([&](i32 age) {
        if (desk.here[age] > 0) atomicAdd(&call.arena.hit_age[age], u64(desk.here[age]));
    });
    __syncthreads();
}

// ---- count

// Whether this entry is the first to name an absent row, and which.
struct Named {
    i32 row;
    bool first;
};

__device__ Named name_first(const Resolve& call, Entry at) {
    if (!call.holds(at.query, at.column)) return {kPad, false};
    const i32 row = call.selection.rows[call.entry(at.query, at.column)];
    const bool is_open = call.purpose == kWarms ||
                         call.slots[call.place_of(at.query, at.column)] == kAbsent;
    if (!is_open || !call.selection.names(row)) return {row, false};
    const i32 holder = load_relaxed(&call.arena.slot_of[row]);
    return {row, holder == kClaim + i32(call.entry(at.query, at.column))};
}

__device__ void count_rows(const Resolve& call, i32 part, Named named) {
    const i32 count = __syncthreads_count(named.first);
    if (threadIdx.x != 0) return;
    call.first_count[part] = count;
    if (count > 0) atomicAdd(&call.report->missing, count);
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

// How many missing rows lower parts have.
__device__ i32 missing_before(const Resolve& call, i32 part, Desk& desk) {
    i32 sum = 0;
    for (i32 i = threadIdx.x; i < part; i += kThreads) sum += call.first_count[i];
    return sum_threads(sum, desk.of_warp).total;
}

__device__ void assign(const Resolve& call, i32 part, Entry at, Named named, Desk& desk) {
    const i32 claimed = claim_count(*call.report), step = call.moment.now->step;
    const i32 page = named.first ? call.host_page(named.row) : -1;
    const i32 before = missing_before(call, part, desk);
    const bool votes[1][1] = {{named.first}};
    const i32 place = before + rank_votes(votes, desk.of_warp).before[0][0];
    if (!named.first) return;
    const i32 slot = place < claimed ? call.claimed_slots[place] : -1;
    const i32 held = slot < 0 ? -1 : call.arena.row_of[slot];
    const i64 entry = call.entry(at.query, at.column);
    if (slot >= 0 && gives_way(call, place, slot, held, entry))
        hand_over(call, place, entry, named.row, slot, held, {step, call.moment.ticket(), page});
    else store_relaxed(&call.arena.slot_of[named.row], -1);
}

// ---- serve

using Columns = i32[kColumns];

// Where a row without a slot is on the host, for a list and for `slots`.
__device__ i32 serve_in_place(const Resolve& call, i32 row, i32& slot) {
    const i32 host = call.host_row(row, call.host_page(row));
    slot = host < 0 ? kPad : -2 - host;
    return host;
}

// The rest of a query's list, and how many it has.
__device__ void end_list(const Resolve& call, i32* lists, i32* counts, i32 query, i32 count) {
    i32* list = lists + call.place_of(query, 0);
#pragma unroll 1
    for (i64 i = count + i32(threadIdx.x); i < call.selection.width; i += kThreads) list[i] = -1;
    if (threadIdx.x == 0) counts[query] = count;
}

// Where an entry is found that was not a hit: of a step's copy its slot, of a landing's none yet.
__device__ i32 find_again(const Resolve& call, i32 mark, i32 row) {
    if (mark == kAbsent) return call.arena.slot_of[row];
    return mark == kBehind ? -1 : -2 - mark;
}

__device__ void serve(const Resolve& call, i32 query, Desk& desk) {
    if (call.purpose == kWarms) return;
    const i64 width = call.selection.width, first = call.place_of(query, 0);
    const bool sorts = call.purpose == kSelects;
    i32 hits = 0, misses = 0, places = 0;
    for (i32 base = 0; base < width; base += kColumns * kThreads) {
        Columns mark, row, slot, host;
        bool is[kColumns][3];
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            const i32 column = base + i * kThreads + i32(threadIdx.x);
            mark[i] = column < width ? call.slots[first + column] : kPad;
            row[i] = column < width ? call.selection.rows[call.entry(query, column)] : kPad;
        }
#pragma unroll
        for (i32 i = 0; i < kColumns; i++)
            slot[i] = mark[i] < kPad ? find_again(call, mark[i], row[i]) : mark[i];
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            is[i][0] = mark[i] >= 0;
            is[i][1] = mark[i] < kPad && slot[i] >= 0;
            is[i][2] = mark[i] < kPad && slot[i] < 0;
            host[i] = is[i][2] ? serve_in_place(call, row[i], slot[i]) : -1;
            const i32 column = base + i * kThreads + i32(threadIdx.x);
            if (mark[i] < kPad) call.slots[first + column] = slot[i];
        }
        const auto ranks = rank_votes(is, desk.of_warp);
#pragma unroll
        for (i32 i = 0; i < kColumns; i++) {
            if (!sorts) continue;
            if (is[i][0]) call.hit[first + hits + ranks.before[i][0]] = slot[i];
            if (is[i][1]) call.miss[first + misses + ranks.before[i][1]] = slot[i];
            if (is[i][2]) call.place[first + places + ranks.before[i][2]] = host[i];
        }
        hits += ranks.total[0];
        misses += ranks.total[1];
        places += ranks.total[2];
    }
    if (threadIdx.x == 0 && hits > 0) atomicAdd(&call.report->hits, hits);
    if (threadIdx.x == 0 && places > 0) atomicAdd(&call.report->places, places);
    if (!sorts) return;
    end_list(call, call.hit, call.hit_count, query, hits);
    end_list(call, call.miss, call.miss_count, query, misses);
    end_list(call, call.place, call.place_count, query, places);
}

}  // namespace

#define ESS_PHASE(name) \
    ESS_KERNEL __launch_bounds__(kThreads) name(const __grid_constant__ Resolve call)
