// The residency of a layer group, as ess/pool/lru/arena.py lays it out, and the search for victims.
#pragma once

#include "../cpu/native.h"

namespace ess {

constexpr int kBlockSlots = 64;
constexpr int kAgeMax = 255;
constexpr int kAgeFree = 256;

// The policies of ess/pool/lru/eviction.py, in its order.
enum class Policy : int64_t { lru = 0, sieve = 1, score = 2 };

struct Arena {
    int32_t* slot_of;
    int32_t* row_of;
    int32_t* last_use;
    int32_t* ticket_of;
    uint8_t* dirty;
    const int32_t* blocks;
    int64_t* hit_age;
    int32_t* scratch;
    int64_t row_count;
    int64_t slab_count;
    int64_t block_count;
    int64_t evicted_count;
    int64_t* came;
    int32_t* spared;
    int64_t* hand;
    uint16_t* rank_of;
    Policy policy;
    // No slot below this one is free, so a search for free slots begins here.
    mutable int64_t free_from;

    int32_t* candidates() const { return scratch; }
    int32_t* candidate_ages() const { return scratch + slab_count; }
    int32_t* victims() const { return scratch + 2 * slab_count; }
    int32_t* probed() const { return scratch + 3 * slab_count; }

    int age(int32_t slot, int32_t step) const {
        if (row_of[slot] < 0) return kAgeFree;
        uint32_t since = uint32_t(step) - uint32_t(last_use[slot]);
        return since < kAgeMax ? int(since) : kAgeMax;
    }
    bool bound(int32_t slot) const { return dirty[slot] || ticket_of[slot]; }

    // The slot passes to `row`; the row that held it, if any, loses it.
    void hand_over(int32_t slot, int32_t row, int32_t used, int32_t ticket) {
        int32_t before = row_of[slot];
        if (before >= 0) slot_of[before] = -1;
        evicted_count += before >= 0;
        slot_of[row] = slot;
        row_of[slot] = row;
        last_use[slot] = used;
        ticket_of[slot] = ticket;
        if (policy == Policy::sieve) came[slot] = hand[1]++, spared[slot] = used;
    }

    // The row leaves its slot, whatever its state.
    void leave(int32_t row, int32_t slot) const {
        slot_of[row] = row_of[slot] = -1;
        dirty[slot] = 0;
        ticket_of[slot] = 0;
        if (slot < free_from) free_from = slot;
    }

    // The row id may stand for another row next time.
    void forget(int32_t row) const {
        if (policy == Policy::score) rank_of[row] = 0;
    }
};

// The first `wanted` victims of age >= `floor` in (age descending, slot ascending) order; returns
// how many there are.
int64_t oldest(const Arena& arena, int32_t step, int64_t wanted, int floor, int32_t* victims);

// The same for the lowest ranks: 255 less the rank's upper byte stands for the age.
int64_t lowest(const Arena& arena, int32_t step, int64_t wanted, int32_t* victims);

// The first `wanted` victims in the order of the arena's policy; nothing else is written.
int64_t choose_victims(const Arena& arena, int32_t step, int64_t wanted, int32_t* victims);

// SIEVE's hand has walked to the last of these victims, which still hold their rows.
void pass_by(Arena& arena, const int32_t* victims, int64_t count, int32_t step);

}  // namespace ess
