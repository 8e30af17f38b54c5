// What differs between the policies: the order of victims, SIEVE's walk, and the ranks of rows.
//
// The twin of ess/pool/lru/victims.py and of the scores in eviction.py: same arrays, same bits.
// Scores are comparisons, one difference and one product in float32, without contraction.
#include <algorithm>
#include <cmath>

#include "arena.h"
#include "values.h"

namespace ess {

namespace {

constexpr float kScoreFloor = 128, kScoreMax = 255;
constexpr int kScoreShift = 2;
constexpr int64_t kWrapped = int64_t(1) << 61;

bool is_visited(const Arena& arena, int32_t slot) {
    return arena.last_use[slot] > arena.spared[slot];
}

// How far the hand is from a slot: it goes on from the oldest at the end.
int64_t walk(const Arena& arena, int32_t slot) {
    const int64_t distance = arena.came[slot] - arena.hand[0];
    return distance < 0 ? distance + kWrapped : distance;
}

template <typename Visit>
void each_used(const Arena& arena, const Visit& visit) {
    for (int64_t b = 0; b < arena.block_count; b++)
        for (int32_t slot = arena.blocks[b]; slot < arena.blocks[b] + kBlockSlots; slot++)
            if (arena.row_of[slot] >= 0) visit(slot);
}

// Free slots first; then the walk, which meets what was selected in its second round.
int64_t walk_victims(const Arena& arena, int32_t step, int64_t wanted, int32_t* victims) {
    const int64_t free_count = oldest(arena, step, wanted, kAgeFree, victims);
    int32_t* slots = arena.candidates();
    int64_t listed = 0;
    if (free_count == wanted) return wanted;
    each_used(arena, [&](int32_t slot) {
        slots[listed] = slot;
        listed += arena.age(slot, step) >= 1 && !arena.bound(slot);
    });
    const int64_t count = std::min(listed, wanted - free_count);
    auto sooner = [&](int32_t a, int32_t b) {
        const bool after = is_visited(arena, a), before = is_visited(arena, b);
        return after != before ? before : walk(arena, a) < walk(arena, b);
    };
    std::nth_element(slots, slots + count, slots + listed, sooner);
    std::sort(slots, slots + count, sooner);
    std::copy(slots, slots + count, victims + free_count);
    return free_count + count;
}

struct Scale {
    float floor = INFINITY, factor = 0;

    Scale(const float* logits, const int32_t* selection, int64_t width) {
        float top = -INFINITY;
        for (int64_t i = 0; i < width; i++) {
            if (selection[i] < 0) continue;
            floor = std::fmin(floor, logits[selection[i]]);
            top = std::fmax(top, logits[selection[i]]);
        }
        const float span = top - floor;
        if (span > 0) factor = (kScoreMax - kScoreFloor) / span;
    }
    int32_t operator()(float logit) const {
        float level = kScoreFloor + (logit - floor) * factor;
        level = level < kScoreMax ? level : kScoreMax;
        return int32_t(level > 0 ? level : 0);
    }
};

void follow(uint16_t* rank, const float* logits, int64_t count, const Scale& score) {
    for (int64_t i = 0; i < count; i++) {
        const int32_t aim = score(logits[i]) * 256, before = rank[i];
        const int32_t after = before + ((aim - before) >> kScoreShift);
        rank[i] = uint16_t(before ? after : aim);
    }
}

}  // namespace

int64_t choose_victims(const Arena& arena, int32_t step, int64_t wanted, int32_t* victims) {
    if (arena.policy == Policy::sieve) return walk_victims(arena, step, wanted, victims);
    if (arena.policy == Policy::score) return lowest(arena, step, wanted, victims);
    return oldest(arena, step, wanted, 1, victims);
}

void pass_by(Arena& arena, const int32_t* victims, int64_t count, int32_t step) {
    if (arena.policy != Policy::sieve || count == 0) return;
    const int32_t last = victims[count - 1];
    if (arena.row_of[last] < 0) return;
    const bool all = is_visited(arena, last);
    const int64_t reach = walk(arena, last);
    int64_t newest = 0;
    each_used(arena, [&](int32_t slot) {
        newest = std::max(newest, arena.came[slot]);
        if (all || walk(arena, slot) < reach) arena.spared[slot] = step;
    });
    arena.hand[0] = newest == arena.came[last] ? 0 : arena.came[last] + 1;
}

}  // namespace ess

using namespace ess;

// 1; or 0 with nothing changed: a position, a line or a page that is not there. Query q has logits
// [0, length[q]) at logits + q * stride.
ESS_EXPORT int64_t ess_observe(const Arena* arena, const int32_t* lines, const int32_t* line_of,
                               const int32_t* length, const int32_t* selection,
                               const float* logits, int64_t queries, int64_t width,
                               int64_t stride, int64_t line_count, int64_t page_max) {
    const int64_t page_count = arena->row_count / 64;
    if (!within(line_of, queries, 0, line_count)) return 0;
    if (!within(length, queries, 0, std::min(page_max * 64, stride) + 1)) return 0;
    for (int64_t q = 0; q < queries; q++) {
        if (!within(selection + q * width, width, -1, length[q])) return 0;
        if (!within(lines + line_of[q] * page_max, (length[q] + 63) / 64, 0, page_count)) return 0;
    }
    for (int64_t q = 0; q < queries; q++) {
        const float* mine = logits + q * stride;
        const Scale score(mine, selection + q * width, width);
        for (int64_t first = 0; first < length[q]; first += 64) {
            const int64_t page = lines[line_of[q] * page_max + first / 64];
            follow(arena->rank_of + page * 64, mine + first,
                   std::min<int64_t>(64, length[q] - first), score);
        }
    }
    return 1;
}
