// The oldest slots of an arena, in one pass and without a sort.
//
// Contract. victims[0..n) are the first n = min(wanted, eligible) slots in the order (age
// descending, slot ascending), where eligible means free, or of age >= floor >= 1, landed and
// clean. Nothing but `victims` and the scratch is written, and where a search for free slots may
// begin the next time: all slots below the first that it found are used, and stay so until one is
// left (`Arena::leave`).
//
// The pass goes over the slots in ascending order, keeps a list of candidates with a histogram of
// their ages, and a rising floor: the smallest age that can still matter. `reach` counts the
// candidates of age >= floor. Once reach == wanted, a later slot of that same age would lose every
// tie against them, so the floor rises by one and reach loses the bin it left. A slot below the
// floor is therefore never among the oldest, and few slots pass: for ages in random order about
// wanted * ln(slots / wanted). A slot costs a fraction of one vector compare and of one compress,
// and no branch; the histogram and the floor are brought up to date once per 256 candidates.
// When the floor is above 255 only free slots matter and last_use is not even read; above 256 the
// pass is over.
//
// A counting sort then puts the candidates in order. It is stable, and candidates are listed by
// ascending slot, which is the tie rule. Stragglers from before the floor rose get places past
// `wanted` and are left out.
//
// What would break it: blocks that are not ascending; a used slot with last_use > step (taken for
// age 255, never out of bounds); a free slot that is dirty or in flight (taken nevertheless).
#include <algorithm>

#include "arena.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,popcnt")))
#define AVX512 __attribute__((target("avx512f,popcnt")))
#endif

namespace ess {

namespace {

constexpr int64_t kBatch = 256;

struct Search {
    const Arena& arena;
    int32_t step;
    int64_t wanted;
    int floor;
    int32_t* slots;
    int32_t* ages;
    int64_t listed = 0;
    int64_t counted = 0;
    int64_t reach = 0;
    int64_t count[kAgeFree + 1] = {};

    bool complete() const { return floor > kAgeFree; }

    // Candidates listed since the last time lose the dirty and the unlanded, and enter the count.
    void admit() {
        int64_t kept = counted;
        for (int64_t i = counted; i < listed; i++) {
            slots[kept] = slots[i];
            ages[kept] = ages[i];
            bool eligible = ages[i] == kAgeFree || !arena.bound(slots[i]);
            count[ages[i]] += eligible;
            kept += eligible;
        }
        reach += kept - counted;
        listed = counted = kept;
        while (reach >= wanted && !complete()) reach -= count[floor++];
    }

    int64_t sorted(int32_t* victims) {
        int64_t place[kAgeFree + 1];
        int64_t next = 0;
        for (int age = kAgeFree; age >= 0; age--) {
            place[age] = next;
            next += count[age];
        }
        int32_t left_out;
        for (int64_t i = 0; i < listed; i++) {
            int64_t at = place[ages[i]]++;
            *(at < wanted ? victims + at : &left_out) = slots[i];
        }
        return listed < wanted ? listed : wanted;
    }
};

// A block's slots of age >= floor, appended at (slots, ages); returns how many. What lies past them
// in these lists may be overwritten, within the block's 64 places.
int64_t list_portable(const Arena& arena, int32_t step, int floor, int32_t first, int32_t* slots,
                      int32_t* ages) {
    int64_t listed = 0;
    for (int32_t slot = first; slot < first + kBlockSlots; slot++) {
        slots[listed] = slot;
        ages[listed] = arena.age(slot, step);
        listed += ages[listed] >= floor;
    }
    return listed;
}

#if defined(__x86_64__)
// For each mask of eight lanes, the lanes that are set, first to last.
struct LaneTable {
    alignas(8) uint8_t lanes[256][8];
    constexpr LaneTable() : lanes{} {
        for (int mask = 0; mask < 256; mask++)
            for (int lane = 0, to = 0; lane < 8; lane++)
                if (mask >> lane & 1) lanes[mask][to++] = uint8_t(lane);
    }
};
constexpr LaneTable kLanes;

AVX2 __m256i load8(const int32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

AVX2 void store8(int32_t* to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}

AVX2 int64_t list_avx2(const Arena& arena, int32_t step, int floor, int32_t first, int32_t* slots,
                       int32_t* ages) {
    const __m256i saturated = _mm256_set1_epi32(kAgeMax), none = _mm256_set1_epi32(kAgeFree);
    const __m256i now = _mm256_set1_epi32(step), below = _mm256_set1_epi32(floor - 1);
    int64_t listed = 0;
    for (int32_t slot = first; slot < first + kBlockSlots; slot += 8) {
        __m256i since = _mm256_sub_epi32(now, load8(arena.last_use + slot));
        __m256i is_free = _mm256_srai_epi32(load8(arena.row_of + slot), 31);
        __m256i age = _mm256_blendv_epi8(_mm256_min_epu32(since, saturated), none, is_free);
        __m256 older = _mm256_castsi256_ps(_mm256_cmpgt_epi32(age, below));
        unsigned mask = unsigned(_mm256_movemask_ps(older));
        __m256i lanes = _mm256_cvtepu8_epi32(
            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kLanes.lanes[mask])));
        store8(slots + listed, _mm256_add_epi32(lanes, _mm256_set1_epi32(slot)));
        store8(ages + listed, _mm256_permutevar8x32_epi32(age, lanes));
        listed += _mm_popcnt_u32(mask);
    }
    return listed;
}

AVX512 int64_t list_avx512(const Arena& arena, int32_t step, int floor, int32_t first,
                           int32_t* slots, int32_t* ages) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i saturated = _mm512_set1_epi32(kAgeMax), none = _mm512_set1_epi32(kAgeFree);
    const __m512i now = _mm512_set1_epi32(step), limit = _mm512_set1_epi32(floor);
    int64_t listed = 0;
    for (int32_t slot = first; slot < first + kBlockSlots; slot += 16) {
        __m512i row = _mm512_loadu_si512(arena.row_of + slot);
        __mmask16 used = _mm512_cmpge_epi32_mask(row, _mm512_setzero_si512());
        __m512i age = _mm512_mask_set1_epi32(none, used, 0);
        if (floor <= kAgeMax) {
            __m512i since = _mm512_sub_epi32(now, _mm512_loadu_si512(arena.last_use + slot));
            age = _mm512_mask_min_epu32(none, used, since, saturated);
        }
        __mmask16 older = _mm512_cmpge_epi32_mask(age, limit);
        __m512i names = _mm512_add_epi32(iota, _mm512_set1_epi32(slot));
        _mm512_storeu_si512(slots + listed, _mm512_maskz_compress_epi32(older, names));
        _mm512_storeu_si512(ages + listed, _mm512_maskz_compress_epi32(older, age));
        listed += _mm_popcnt_u32(older);
    }
    return listed;
}
#endif

// The same of slots that stand by their rows' ranks; those of this step are passed over.
int64_t list_ranked(const Arena& arena, int32_t step, int floor, int32_t first, int32_t* slots,
                    int32_t* ages) {
    int64_t listed = 0;
    for (int32_t slot = first; slot < first + kBlockSlots; slot++) {
        const int32_t row = arena.row_of[slot];
        slots[listed] = slot;
        ages[listed] = row < 0 ? kAgeFree : kAgeMax - (arena.rank_of[row] >> 8);
        listed += ages[listed] >= floor && (row < 0 || arena.last_use[slot] != step);
    }
    return listed;
}

using List = decltype(&list_portable);

List list_block() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return list_avx512;
    if (isa() == Isa::avx2) return list_avx2;
#endif
    return list_portable;
}

// A group's blocks lie scattered over the slab: hardware prefetch does not follow them.
__attribute__((always_inline)) inline void prefetch_block(const Arena& arena, int64_t b,
                                                          bool with_ages) {
    if (b >= arena.block_count) return;
    for (int32_t slot = arena.blocks[b]; slot < arena.blocks[b] + kBlockSlots; slot += 16) {
        __builtin_prefetch(arena.row_of + slot, 0, 2);
        if (with_ages) __builtin_prefetch(arena.last_use + slot, 0, 2);
    }
}

// The block of the first slot that may be free.
int64_t first_block(const Arena& arena) {
    const int32_t* end = arena.blocks + arena.block_count;
    const int64_t from = arena.free_from - kBlockSlots;
    return std::upper_bound(arena.blocks, end, from) - arena.blocks;
}

int64_t search_with(List list, const Arena& arena, int32_t step, int64_t wanted, int floor,
                    int32_t* victims) {
    if (wanted == 0) return 0;
    Search search{arena, step, wanted, floor, arena.candidates(), arena.candidate_ages()};
    const bool only_free = floor > kAgeMax;
    for (int64_t b = only_free ? first_block(arena) : 0; b < arena.block_count; b++) {
        if (search.complete()) break;
        prefetch_block(arena, b + 8, search.floor <= kAgeMax);
        search.listed += list(arena, step, search.floor, arena.blocks[b],
                              search.slots + search.listed, search.ages + search.listed);
        if (search.listed - search.counted >= kBatch) search.admit();
    }
    search.admit();
    if (only_free) arena.free_from = search.listed ? search.slots[0] : arena.slab_count;
    return search.sorted(victims);
}

}  // namespace

int64_t oldest(const Arena& arena, int32_t step, int64_t wanted, int floor, int32_t* victims) {
    return search_with(list_block(), arena, step, wanted, floor, victims);
}

int64_t lowest(const Arena& arena, int32_t step, int64_t wanted, int32_t* victims) {
    return search_with(list_ranked, arena, step, wanted, 0, victims);
}

}  // namespace ess
