// The native twin of ess/pool/lru/specification.py: same arrays in, same bits out.
//
// A plan costs one random probe of slot_of per selected entry; only when something is missing does
// it also pass once over the arena (oldest.cpp, or as eviction.cpp says). Nothing is hashed and
// nothing grows with the context. While a call runs, slot_of itself remembers what was already
// seen: -2 - i marks the row as the i-th missing one, so a second occurrence finds the same claim,
// and a row named twice where rows must be distinct is noticed. Every mark is gone when the call
// returns.
//
// Functions return a count, or a refusal (below zero) that the caller turns into an assertion.
// Every refusal but kUsedLater comes before anything has changed.
//
// A resolve may also move what it claims: a few rows are copied, and landed, before it returns,
// since that takes less time than to tell a lane about them.
#include <algorithm>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../cpu/moves/rows.h"
#include "planner.h"
#include "values.h"

namespace ess {

namespace {

constexpr int64_t kRowOutOfRange = -1;
constexpr int64_t kRowTwice = -2;
constexpr int64_t kInFlight = -3;
constexpr int64_t kUsedLater = -4;
constexpr int64_t kAgesNotAscending = -5;
constexpr int64_t kSlotOutOfRange = -6;
constexpr int64_t kPageNotActive = -7;
constexpr int64_t kBadPosition = -8;
constexpr int64_t kFreeSlot = -9;

constexpr int64_t kStreamAbove = 16 << 20;  // STREAM_ABOVE_BYTES of ess/flashtrans/rows.py
constexpr int kIntoL2 = 2;
constexpr int64_t kMapAhead = 256;
constexpr int64_t kSlotAhead = 48;

// One call of plan: `probe` each query, `claim` for what is missing, `serve` each query the rest.
struct Plan {
    Arena& arena;
    Split& split;
    const int32_t* rows;
    int64_t width;
    int64_t last;
    int32_t step;
    int32_t latest = INT32_MIN;
    int64_t missing = 0;
    int64_t pending = 0;
    // Two histograms in turn: most hits have the same few ages, and an increment that follows its
    // like waits for it. Age 0 lands in a bin that is thrown away.
    uint32_t ages[2][kAgeMax + 1] = {};

    int32_t absent(int32_t row) {
        split.claimed_rows()[missing] = row;
        return arena.slot_of[row] = int32_t(-2 - missing++);
    }

    void stamp(int32_t slot, int64_t at) {
        int32_t used = std::exchange(arena.last_use[slot], step);
        latest = std::max(latest, used);
        ages[at & 1][std::min(uint32_t(step) - uint32_t(used), uint32_t(kAgeMax))]++;
    }

    // First the map's line, then, when that is here, the lines of its slot; into L2, which can wait
    // for several times as many lines at once as L1 can. An address that means nothing, for a pad
    // or a marked row, is harmless. (Inlined by force: a function that only prefetches counts as
    // one without effect, and its calls are deleted.)
    __attribute__((always_inline)) void prefetch(int64_t at) const {
        __builtin_prefetch(arena.slot_of + rows[std::min(at + kMapAhead, last)], 0, kIntoL2);
        int32_t slot = arena.slot_of[std::max(rows[std::min(at + kSlotAhead, last)], 0)];
        __builtin_prefetch(arena.last_use + slot, 0, kIntoL2);
        __builtin_prefetch(arena.ticket_of + slot, 0, kIntoL2);
    }

    void probe(int64_t query) {
        int32_t* slots = split.slots + query * split.width;
        int32_t* hit = split.hit + query * split.width;
        int64_t at = query * width, hits = 0;
        for (int64_t column = 0; column < width; column++, at++) {
            int32_t row = rows[at];
            prefetch(at);
            int32_t slot = -1;
            if (row >= 0) {
                slot = arena.slot_of[row];
                if (slot >= 0 && arena.ticket_of[slot] == 0) {
                    stamp(slot, at);
                    hit[hits++] = slot;
                } else {
                    if (slot >= 0) late(slot);
                    else if (slot == -1) slot = absent(row);
                    split.pending[pending++] = int32_t(at);
                }
            }
            slots[column] = slot;
        }
        std::fill(hit + hits, hit + width, -1);
        split.hit_count[query] = int32_t(hits);
        split.hit_total += hits;
    }

    void late(int32_t slot) {
        latest = std::max(latest, std::exchange(arena.last_use[slot], step));
        split.late_ticket = std::max<int64_t>(split.late_ticket, arena.ticket_of[slot]);
    }

    int64_t claim(int32_t ticket) {
        int64_t claimed = choose_victims(arena, step, missing, split.claimed_slots());
        pass_by(arena, split.claimed_slots(), claimed, step);
        for (int64_t i = 0; i < claimed; i++) {
            int32_t next = split.claimed_slots()[std::min(i + kSlotAhead, claimed - 1)];
            __builtin_prefetch(arena.slot_of + arena.row_of[next], 0, kIntoL2);
            arena.hand_over(split.claimed_slots()[i], split.claimed_rows()[i], step, ticket);
        }
        for (int64_t i = claimed; i < missing; i++) arena.slot_of[split.claimed_rows()[i]] = -1;
        return claimed;
    }

    // The entries of one query that were not hits, from pending[from] on, to miss or to place.
    int64_t serve(int64_t query, int64_t from, int64_t claimed) {
        int32_t* miss = split.miss + query * split.width;
        int32_t* place = split.place + query * split.width;
        int32_t misses = 0, places = 0;
        for (; from < pending && split.pending[from] < (query + 1) * width; from++) {
            int64_t at = split.pending[from];
            int32_t& slot = split.slots[query * split.width + at - query * width];
            int64_t claim = -2 - int64_t(slot);
            if (claim >= claimed) {
                place[places++] = rows[at];
                slot = -2 - rows[at];
            } else {
                if (claim >= 0) slot = split.claimed_slots()[claim];
                miss[misses++] = slot;
            }
        }
        std::fill(miss + misses, miss + width, -1);
        std::fill(place + places, place + width, -1);
        split.miss_count[query] = misses;
        split.place_count[query] = places;
        split.place_total += places;
        return from;
    }
};

// False: nothing is written.
bool translate(const int32_t* selection, const int32_t* page_table, const int32_t* table_row,
               const int32_t* length, int32_t* out, int64_t queries, int64_t width, int64_t tables,
               int64_t pages) {
    if (!within(table_row, queries, 0, tables)) return false;
    if (!within(length, queries, 0, pages * 64 + 1)) return false;
    for (int64_t q = 0; q < queries; q++) {
        const int32_t* table = page_table + table_row[q] * pages;
        const int32_t* position = selection + q * width;
        if (!within(position, width, -1, length[q]) || !ascends(position, width)) return false;
        int32_t page = 0;
        for (int64_t c = 0; c < width; c++)
            if (position[c] >= 0) page |= table[position[c] >> 6];
        if (page < 0) return false;
    }
    for (int64_t q = 0; q < queries; q++) {
        const int32_t* table = page_table + table_row[q] * pages;
        for (int64_t at = q * width; at < (q + 1) * width; at++) {
            int32_t position = selection[at];
            out[at] = position < 0 ? -1 : table[position >> 6] * 64 + (position & 63);
        }
    }
    return true;
}

bool translate(const Lookup& in, const int32_t* selection, const int32_t* line_of,
               const int32_t* length, int32_t* out, int64_t queries, int64_t width) {
    return translate(selection, in.lines, line_of, length, out, queries, width, in.line_count,
                     in.page_max);
}

// Host rows of claimed rows, and how many of them some layer never stored.
bool name_sources(Lookup& in, const int32_t* rows, int64_t n, int64_t first, int64_t layers) {
    in.unwritten_count = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t page = in.host_page_of[rows[i] >> 6];
        if (page < 0) return false;
        in.host_rows[i] = int32_t(page * 64 + (rows[i] & 63));
        const uint64_t* mask = in.stored + first * in.host_page_count + page;
        uint64_t common = ~uint64_t(0);
        for (int64_t layer = 0; layer < layers; layer++) common &= mask[layer * in.host_page_count];
        in.unwritten_count += ~common >> (rows[i] & 63) & 1;
    }
    return true;
}

// Claims whose rows are all there to be copied, and few: copied, and no longer in flight. When each
// layer's copy began goes to `times`, and behind these when the last one ended.
bool land_at_once(Arena& arena, const Split& split, const Lookup& in, int64_t claimed,
                  int64_t layers) {
    const int64_t bytes = claimed * layers * in.row_bytes;
    if (bytes == 0 || bytes > in.at_once_bytes) return false;
    if (in.unwritten_count || split.late_ticket) return false;
    const int64_t host_count = in.host_page_count * 64;
    in.times[0] = now_ns();
    for (int64_t j = 0; j < layers; j++) {
        uint8_t* host = in.host + j * host_count * in.row_bytes;
        uint8_t* slab = in.slab + j * 64 * in.row_bytes;
        const RowSide from = {host, in.row_bytes, host_count, in.host_rows, 4};
        const RowSide to = {slab, in.row_bytes, in.slab_count - j * 64, split.claimed_slots(), 4};
        copy_rows({from, to, claimed, in.row_bytes}, 1, kStreamAbove);
        in.times[j + 1] = now_ns();
    }
    for (int64_t i = 0; i < claimed; i++) arena.ticket_of[split.claimed_slots()[i]] = 0;
    return true;
}

int64_t plan(Arena& arena, Split& split, const int32_t* rows, int64_t queries, int64_t width,
             int64_t step, int64_t ticket) {
    if (!within(rows, queries * width, -1, arena.row_count)) return kRowOutOfRange;
    split.hit_total = split.place_total = split.late_ticket = arena.evicted_count = 0;
    Plan plan{arena, split, rows, width, queries * width - 1, int32_t(step)};
    for (int64_t q = 0; q < queries; q++) plan.probe(q);
    for (int age = 1; age <= kAgeMax; age++)
        arena.hit_age[age] += plan.ages[0][age] + plan.ages[1][age];
    int64_t claimed = plan.claim(int32_t(ticket));
    int64_t next = 0;
    for (int64_t q = 0; q < queries; q++) next = plan.serve(q, next, claimed);
    return plan.latest > step ? kUsedLater : claimed;
}

// Rows from `first` on become their landed slots, -1 for those that have none; how many have none.
int64_t landed(const Arena& arena, int32_t* slots, int64_t first, int64_t n) {
    int64_t absent = 0;
    for (int64_t i = first; i < n; i++) {
        __builtin_prefetch(arena.slot_of + std::max(slots[std::min(i + 32, n - 1)], 0));
        if (slots[i] < 0) continue;
        const int32_t slot = arena.slot_of[slots[i]];
        slots[i] = slot >= 0 && arena.ticket_of[slot] == 0 ? slot : -1;
        absent += slots[i] < 0;
    }
    return absent;
}

#if defined(__x86_64__)
// Each entry has a line of the map and one of the tickets. Sixteen are gathered at once, and lines
// of later ones are requested; to request an address that means nothing is harmless.
__attribute__((target("avx512f,popcnt"))) int64_t landed_avx512(const Arena& arena,
                                                               int32_t* slots, int64_t n) {
    const __m512i none = _mm512_set1_epi32(-1), zero = _mm512_setzero_si512();
    int64_t absent = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int64_t j = i + kMapAhead; j < std::min(i + kMapAhead + 16, n); j++)
            __builtin_prefetch(arena.slot_of + slots[j], 0);
        for (int64_t j = i + kSlotAhead; j < std::min(i + kSlotAhead + 16, n); j++)
            __builtin_prefetch(arena.ticket_of + arena.slot_of[std::max(slots[j], 0)], 0);
        const __m512i row = _mm512_loadu_si512(slots + i);
        const __mmask16 asked = _mm512_cmpge_epi32_mask(row, zero);
        const __m512i slot = _mm512_mask_i32gather_epi32(none, asked, row, arena.slot_of, 4);
        const __mmask16 found = _mm512_mask_cmpge_epi32_mask(asked, slot, zero);
        const __m512i ticket = _mm512_mask_i32gather_epi32(none, found, slot, arena.ticket_of, 4);
        const __mmask16 there = _mm512_mask_cmpeq_epi32_mask(found, ticket, zero);
        _mm512_storeu_si512(slots + i, _mm512_mask_mov_epi32(none, there, slot));
        absent += _mm_popcnt_u32(asked & ~there);
    }
    return absent + landed(arena, slots, i, n);
}
#endif

// Where each row is, into `slot`; afterwards slot_of is as before.
int64_t probe_distinct(const Arena& arena, const int32_t* rows, int64_t n, int32_t* slot) {
    if (!within(rows, n, 0, arena.row_count)) return kRowOutOfRange;
    int64_t seen = 0;
    for (; seen < n; seen++) {
        slot[seen] = arena.slot_of[rows[seen]];
        if (slot[seen] < -1) break;
        arena.slot_of[rows[seen]] = -2;
    }
    for (int64_t i = 0; i < seen; i++) arena.slot_of[rows[i]] = slot[i];
    return seen == n ? n : kRowTwice;
}

// Pages are dropped whole and most of their rows are absent: 16 consecutive ids cost two vector
// compares.
inline __attribute__((always_inline)) int64_t drop_rows(Arena& arena, const int32_t* rows,
                                                        int64_t n) {
    int64_t left = 0;
    auto leave = [&](int32_t row) {
        int32_t slot = arena.slot_of[row];
        arena.forget(row);
        if (slot < 0) return;
        left++;
        arena.leave(row, slot);
    };
    for (int64_t i = 0; i < n;) {
        if (n - i >= 16 && rows[i] + int64_t(16) <= arena.row_count) {
            int32_t astray = 0, held = -1;
            for (int32_t j = 0; j < 16; j++) {
                astray |= rows[i + j] ^ (rows[i] + j);
                held &= arena.slot_of[rows[i] + j];
            }
            if (astray == 0 && held < 0) {
                if (arena.policy == Policy::score)
                    std::fill_n(arena.rank_of + rows[i], 16, uint16_t(0));
                i += 16;
                continue;
            }
        }
        for (int64_t end = std::min(n, i + 16); i < end; i++) leave(rows[i]);
    }
    return left;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) int64_t drop_avx2(Arena& arena, const int32_t* rows, int64_t n) {
    return drop_rows(arena, rows, n);
}
#endif

}  // namespace

}  // namespace ess

using namespace ess;

// 1 with `out` written, or 0 with nothing changed: the caller finds and names what is wrong.
ESS_EXPORT int64_t ess_translate(const int32_t* selection, const int32_t* page_table,
                                 const int32_t* table_row, const int32_t* length, int32_t* out,
                                 int64_t queries, int64_t width, int64_t tables,
                                 int64_t pages) {
    return translate(selection, page_table, table_row, length, out, queries, width, tables, pages);
}

// The claims made, in split->claimed_slots and claimed_rows.
ESS_EXPORT int64_t ess_plan(Arena* arena, Split* split, const int32_t* rows, int64_t queries,
                            int64_t width, int64_t step, int64_t ticket) {
    return plan(*arena, *split, rows, queries, width, step, ticket);
}

// A plan of positions: row ids go to in->rows, the host rows of the claims to in->host_rows, and
// in->is_landed says whether they have been fetched already.
ESS_EXPORT int64_t ess_resolve(Arena* arena, Split* split, Lookup* in, const int32_t* selection,
                               const int32_t* line_of, const int32_t* length, int64_t queries,
                               int64_t width, int64_t first_layer, int64_t layers, int64_t step,
                               int64_t ticket) {
    if (!translate(*in, selection, line_of, length, in->rows, queries, width)) return kBadPosition;
    int64_t claimed = plan(*arena, *split, in->rows, queries, width, step, ticket);
    if (claimed < 0) return claimed;
    if (!name_sources(*in, split->claimed_rows(), claimed, first_layer, layers))
        return kPageNotActive;
    in->is_landed = land_at_once(*arena, *split, *in, claimed, layers);
    return claimed;
}

// How many positions have no landed slot; slots, -1 for these and for pads, go to `slots`.
ESS_EXPORT int64_t ess_locate(const Arena* arena, const Lookup* in, const int32_t* selection,
                              const int32_t* line_of, const int32_t* length, int32_t* slots,
                              int64_t queries, int64_t width) {
    if (!translate(*in, selection, line_of, length, slots, queries, width)) return kBadPosition;
    const int64_t n = queries * width;
    if (!within(slots, n, -1, arena->row_count)) return kRowOutOfRange;
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return landed_avx512(*arena, slots, n);
#endif
    return landed(*arena, slots, 0, n);
}

// 1, or 0 when there is no room and nothing has changed.
ESS_EXPORT int64_t ess_claim_new(Arena* arena, const int32_t* rows, int32_t* out, int64_t n,
                                 int64_t step) {
    if (n > arena->block_count * kBlockSlots) return 0;
    int32_t* probed = arena->probed();
    if (int64_t refused = probe_distinct(*arena, rows, n, probed); refused < 0) return refused;
    for (int64_t i = 0; i < n; i++)
        if (probed[i] >= 0 && arena->ticket_of[probed[i]]) return kInFlight;
    int64_t absent = std::count(probed, probed + n, -1);
    auto found = [&](int64_t i) { return arena->slot_of[rows[i]] >= 0; };
    // From here `probed` keeps the last use of the rows that were found, to be put back.
    for (int64_t i = 0; i < n; i++)
        if (found(i)) probed[i] = std::exchange(arena->last_use[probed[i]], int32_t(step));
    // Free slots go before all others, so where they are enough no age is looked at.
    if (oldest(*arena, int32_t(step), absent, kAgeFree, arena->victims()) < absent &&
        choose_victims(*arena, int32_t(step), absent, arena->victims()) < absent) {
        for (int64_t i = 0; i < n; i++)
            if (found(i)) arena->last_use[arena->slot_of[rows[i]]] = probed[i];
        return 0;
    }
    pass_by(*arena, arena->victims(), absent, int32_t(step));
    for (int64_t i = 0, next = 0; i < n; i++) {
        if (!found(i)) arena->hand_over(arena->victims()[next++], rows[i], int32_t(step), 0);
        out[i] = arena->slot_of[rows[i]];
        arena->dirty[out[i]] = 1;
    }
    return 1;
}

// How many arenas had room, in their order, each with its own line of `out`, `stride` from the one
// before; behind one that had none nothing has changed. `absent` says how many of the rows were new
// to each.
ESS_EXPORT int64_t ess_claim_each(Arena* const* arenas, const int32_t* rows, int32_t* out,
                                  int32_t* absent, int64_t count, int64_t n, int64_t stride,
                                  int64_t step) {
    for (int64_t i = 0; i < count; i++) {
        if (!within(rows, n, 0, arenas[i]->row_count)) return kRowOutOfRange;
        absent[i] = 0;
        for (int64_t j = 0; j < n; j++) absent[i] += arenas[i]->slot_of[rows[j]] < 0;
        const int64_t done = ess_claim_new(arenas[i], rows, out + i * stride, n, step);
        if (done != 1) return done < 0 ? done : i;
    }
    return count;
}

// The claims made; `place` is working room for n.
ESS_EXPORT int64_t ess_warm(Arena* arena, const int32_t* rows, const int32_t* ages,
                            int32_t* claimed_slots, int32_t* claimed_rows, int32_t* place,
                            int64_t n, int64_t step, int64_t ticket) {
    for (int64_t i = 0; i < n; i++)
        if (ages[i] < (i ? ages[i - 1] : 1)) return kAgesNotAscending;
    if (int64_t refused = probe_distinct(*arena, rows, n, place); refused < 0) return refused;
    int64_t absent = 0;
    for (int64_t i = 0; i < n; i++) {
        if (place[i] < 0) {
            place[absent++] = int32_t(i);
        } else {
            int32_t& used = arena->last_use[place[i]];
            used = std::max(used, int32_t(step - ages[i]));
        }
    }
    arena->evicted_count = 0;
    int floor = n ? std::min(ages[0], kAgeMax) + 1 : 1;
    int64_t found = oldest(*arena, int32_t(step), absent, floor, claimed_slots);
    for (int64_t i = 0; i < found; i++) {
        int32_t age = ages[place[i]];
        if (arena->age(claimed_slots[i], int32_t(step)) <= std::min(age, kAgeMax)) found = i;
        if (i == found) break;
        claimed_rows[i] = rows[place[i]];
        arena->hand_over(claimed_slots[i], claimed_rows[i], int32_t(step - age), int32_t(ticket));
    }
    if (arena->policy == Policy::sieve)  // the newest were first, and are to be met last
        for (int64_t i = 0; i < found; i++) arena->came[claimed_slots[i]] = arena->hand[1] - 1 - i;
    return found;
}

ESS_EXPORT int64_t ess_land(Arena* arena, const int32_t* slots, int64_t n, int64_t ticket) {
    if (!within(slots, n, 0, arena->slab_count)) return kSlotOutOfRange;
    for (int64_t i = 0; i < n; i++)
        if (arena->ticket_of[slots[i]] == ticket) arena->ticket_of[slots[i]] = 0;
    return n;
}

ESS_EXPORT int64_t ess_drop(Arena* arena, const int32_t* rows, int64_t n) {
    if (!within(rows, n, 0, arena->row_count)) return kRowOutOfRange;
#if defined(__x86_64__)
    if (isa() != Isa::portable) return drop_avx2(*arena, rows, n);
#endif
    return drop_rows(*arena, rows, n);
}

ESS_EXPORT int64_t ess_drop_each(Arena* const* arenas, const int32_t* rows, int64_t* left,
                                 int64_t count, int64_t n) {
    for (int64_t i = 0; i < count; i++) {
        left[i] = ess_drop(arenas[i], rows, n);
        if (left[i] < 0) return left[i];
    }
    return count;
}

ESS_EXPORT int64_t ess_settle(Arena* arena, const int32_t* slots, int64_t n) {
    if (!within(slots, n, 0, arena->slab_count)) return kSlotOutOfRange;
    for (int64_t i = 0; i < n; i++)
        if (arena->row_of[slots[i]] < 0) return kFreeSlot;
    for (int64_t i = 0; i < n; i++) arena->dirty[slots[i]] = 0;
    return n;
}
