// The oldest slots of an arena, in one pass and without a sort.
//
// Contract. victims[0..n) are the first n = min(wanted, eligible) slots in the order (age
// descending, slot ascending), where eligible means free, or of age >= floor >= 1, landed and
// clean. Nothing but `victims` and the scratch is written.
//
// The pass goes over the slots in ascending order and keeps a list of candidates, a histogram of
// their ages, and a rising floor: the smallest age that can still matter. `reach` counts the
// candidates of age >= floor. As soon as reach == wanted, a later slot of that same age would lose
// every tie against them, so the floor rises by one and reach loses the bin it left. A slot below
// the floor is therefore never among the oldest, and only few slots pass it: for ages in random
// order about wanted * ln(slots / wanted). The others cost one vector compare. Once the floor is
// above 255 only free slots matter and last_use is not even read; above 256 the pass is over.
//
// A counting sort then puts the candidates in order. It is stable, and candidates are listed by
// ascending slot, which is the tie rule. Stragglers from before the floor rose get places past
// `wanted` and are left out.
//
// What would break it: blocks that are not ascending; a used slot with last_use > step (taken for
// age 255, never out of bounds); a free slot that is dirty or in flight (taken nevertheless).
#include "arena.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ess {

namespace {

struct Search {
    const Arena& arena;
    int32_t step;
    int64_t wanted;
    int floor;
    int64_t reach = 0;
    int64_t listed = 0;
    int64_t count[kAgeFree + 1] = {};

    bool complete() const { return floor > kAgeFree; }

    void consider(int32_t slot) {
        int age = arena.age(slot, step);
        if (age < floor || (age != kAgeFree && arena.bound(slot))) return;
        arena.candidates()[listed++] = slot;
        count[age]++;
        reach++;
        while (reach >= wanted && !complete()) reach -= count[floor++];
    }

    int64_t sorted(int32_t* victims) {
        int64_t place[kAgeFree + 1];
        int64_t next = 0;
        for (int age = kAgeFree; age >= 0; age--) {
            place[age] = next;
            next += count[age];
        }
        for (int64_t i = 0; i < listed; i++) {
            int32_t slot = arena.candidates()[i];
            int64_t at = place[arena.age(slot, step)]++;
            if (at < wanted) victims[at] = slot;
        }
        return listed < wanted ? listed : wanted;
    }
};

void scan_portable(Search& search) {
    const Arena& arena = search.arena;
    for (int64_t b = 0; b < arena.block_count && !search.complete(); b++)
        for (int i = 0; i < kBlockSlots; i++) search.consider(arena.blocks[b] + i);
}

#if defined(__x86_64__)
void prefetch_block(const Arena& arena, int64_t b) {
    if (b >= arena.block_count) return;
    for (int i = 0; i < kBlockSlots; i += 16) {
        __builtin_prefetch(arena.row_of + arena.blocks[b] + i);
        __builtin_prefetch(arena.last_use + arena.blocks[b] + i);
    }
}

__attribute__((target("avx2"))) __m256i load8(const int32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

__attribute__((target("avx2"))) unsigned older8(const Search& search, int32_t slot) {
    __m256i row = load8(search.arena.row_of + slot);
    if (search.floor > kAgeMax) return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(row)));
    __m256i since = _mm256_sub_epi32(_mm256_set1_epi32(search.step),
                                     load8(search.arena.last_use + slot));
    __m256i age = _mm256_min_epu32(since, _mm256_set1_epi32(kAgeMax));
    __m256i older = _mm256_cmpgt_epi32(age, _mm256_set1_epi32(search.floor - 1));
    return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(older, row))));
}

__attribute__((target("avx2"))) void scan_avx2(Search& search) {
    const Arena& arena = search.arena;
    for (int64_t b = 0; b < arena.block_count && !search.complete(); b++) {
        prefetch_block(arena, b + 2);
        for (int32_t slot = arena.blocks[b]; slot < arena.blocks[b] + kBlockSlots; slot += 8)
            for (unsigned mask = older8(search, slot); mask; mask &= mask - 1)
                search.consider(slot + __builtin_ctz(mask));
    }
}

__attribute__((target("avx512f"))) unsigned older16(const Search& search, int32_t slot) {
    __m512i row = _mm512_loadu_si512(search.arena.row_of + slot);
    unsigned is_free = _mm512_cmplt_epi32_mask(row, _mm512_setzero_si512());
    if (search.floor > kAgeMax) return is_free;
    __m512i since = _mm512_sub_epi32(_mm512_set1_epi32(search.step),
                                     _mm512_loadu_si512(search.arena.last_use + slot));
    __m512i age = _mm512_maskz_min_epu32(0xffff, since, _mm512_set1_epi32(kAgeMax));
    return is_free | _mm512_cmpge_epi32_mask(age, _mm512_set1_epi32(search.floor));
}

__attribute__((target("avx512f"))) void scan_avx512(Search& search) {
    const Arena& arena = search.arena;
    for (int64_t b = 0; b < arena.block_count && !search.complete(); b++) {
        prefetch_block(arena, b + 2);
        for (int32_t slot = arena.blocks[b]; slot < arena.blocks[b] + kBlockSlots; slot += 16)
            for (unsigned mask = older16(search, slot); mask; mask &= mask - 1)
                search.consider(slot + __builtin_ctz(mask));
    }
}
#endif

}  // namespace

int64_t oldest(const Arena& arena, int32_t step, int64_t wanted, int floor, int32_t* victims) {
    if (wanted == 0) return 0;
    Search search{arena, step, wanted, floor};
#if defined(__x86_64__)
    if (isa() == Isa::avx512) scan_avx512(search);
    else if (isa() == Isa::avx2) scan_avx2(search);
    else scan_portable(search);
#else
    scan_portable(search);
#endif
    return search.sorted(victims);
}

}  // namespace ess
