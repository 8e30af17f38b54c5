// What a step makes: its new rows and index keys into slots and active pages, then home to the
// host. The native twins of row_copies.write_new, KeyPages.copy_keys and LatentPool.mark_*, and
// the end of a step (ess/door/residency/seal_at_once.py). A page of keys of a layer is 64 values,
// then 64 scales; a key that comes alone is its value, then its scale. Where `unit` neighbouring
// rows share a key, that of the last of them, a page has 64 / unit.
#include <cstring>
#include <vector>

#include "../residency/arena.h"
#include "keys.h"

namespace {

// Rows are written that have not been read for long: all their lines are requested before the first
// is written, since a store that misses waits alone. (Inlined by force: see planner.cpp.)
__attribute__((always_inline)) inline void request(const uint8_t* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 1);
    __builtin_prefetch(row + bytes - 1, 1);
}

struct KeyPages {
    uint8_t* base;
    int64_t page_count;
};

struct KeyCopy {
    KeyPages source;
    KeyPages target;
    const int32_t* source_rows;
    const int32_t* target_rows;
    const int32_t* layers;
    int64_t count;
    int64_t layer_count;
    int64_t layer_max;
    int64_t value_bytes;
    int64_t scale_bytes;
    int64_t unit;

    int64_t per_page() const { return 64 / unit; }

    uint8_t* page(const KeyPages& pages, int64_t layer, int64_t page) const {
        const int64_t each = value_bytes + scale_bytes;
        return pages.base + (layer * pages.page_count + page) * per_page() * each;
    }
};

void copy_key(const KeyCopy& in, int64_t layer, int64_t from_row, int64_t to_row) {
    if (from_row % in.unit != in.unit - 1) return;
    const uint8_t* from = in.page(in.source, layer, from_row >> 6);
    uint8_t* to = in.page(in.target, layer, to_row >> 6);
    const int64_t here = (from_row & 63) / in.unit, there = (to_row & 63) / in.unit;
    const int64_t split = in.per_page() * in.value_bytes;
    std::memcpy(to + there * in.value_bytes, from + here * in.value_bytes, in.value_bytes);
    std::memcpy(to + split + there * in.scale_bytes, from + split + here * in.scale_bytes,
                in.scale_bytes);
}

void write_key(const ess::Append& in, int64_t i) {
    const int64_t each = in.value_bytes + in.scale_bytes, at = in.row_ids[i] & 63;
    const uint8_t* key = in.keys + i * each;
    uint8_t* page = in.pages + (in.row_ids[i] >> 6) * 64 * each;
    std::memcpy(page + at * in.value_bytes, key, in.value_bytes);
    std::memcpy(page + 64 * in.value_bytes + at * in.scale_bytes, key + in.value_bytes,
                in.scale_bytes);
}

bool all_below(const int32_t* ids, int64_t count, int64_t bound) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; ++i) outside += ids[i] < 0 || ids[i] >= bound;
    return outside == 0;
}

// The end of a step: `kept` rows go home with their keys and are clean, the others leave. What the
// host has of a row is marked. `left` counts, per group, the rows that left. Where another process
// writes the host's rows (`writes` is 0), nothing is copied: they are there when it says so.
struct Sealed {
    ess::Arena* arena;
    const int32_t* slots;
    int64_t first_layer;
    int64_t layer_count;
    int64_t is_keyed;
    uint8_t* host;  // where the rows of its first layer begin
    int64_t row_bytes;
};

struct Seal {
    KeyCopy keys;
    uint8_t* slab;
    uint64_t* stored;
    uint64_t* keyed;
    const int32_t* host_page_of;
    const Sealed* groups;
    int64_t* left;
    int64_t group_count;
    int64_t writes;

    int64_t host_row(int32_t row) const {
        return host_page_of[row >> 6] * int64_t(64) + (row & 63);
    }
};

bool is_sound(const Seal& in, const Sealed& group) {
    for (int64_t i = 0; i < in.keys.count; ++i) {
        const int32_t row = in.keys.source_rows[i], slot = group.slots[i];
        if (row < 0 || row >= group.arena->row_count || in.host_page_of[row >> 6] < 0) return false;
        if (slot < 0 || slot >= group.arena->slab_count) return false;
        if (group.arena->row_of[slot] != row || !group.arena->dirty[slot]) return false;
    }
    return true;
}

__attribute__((always_inline)) inline void request_home(const Seal& in, const Sealed& group,
                                                         int32_t row) {
    const int64_t host_count = in.keys.target.page_count * 64;
    for (int64_t j = 0; j < group.layer_count; ++j)
        request(group.host + (j * host_count + in.host_row(row)) * group.row_bytes,
                group.row_bytes);
}

void send_home(const Seal& in, const Sealed& group, int64_t number, int32_t row, int32_t slot) {
    const int64_t to = in.host_row(row), page_count = in.keys.target.page_count;
    const uint64_t bit = uint64_t(1) << (to & 63);
    for (int64_t j = 0; j < group.layer_count; ++j) {
        const int64_t layer = group.first_layer + j;
        if (in.writes)
            std::memcpy(group.host + (j * page_count * 64 + to) * group.row_bytes,
                        in.slab + (slot + j * 64) * group.row_bytes, group.row_bytes);
        in.stored[layer * page_count + (to >> 6)] |= bit;
    }
    if (group.is_keyed) {
        if (in.writes) copy_key(in.keys, number, row, to);
        in.keyed[number * page_count + (to >> 6)] |= bit;
    }
    group.arena->dirty[slot] = 0;
}

}  // namespace

// Returns 1; or 0 with nothing copied if a row or a layer does not exist.
ESS_EXPORT int32_t ess_keys_copy(const KeyCopy* in) {
    if (!all_below(in->source_rows, in->count, in->source.page_count * 64) ||
        !all_below(in->target_rows, in->count, in->target.page_count * 64) ||
        !all_below(in->layers, in->layer_count, in->layer_max))
        return 0;
    for (int64_t i = 0; i < in->layer_count; ++i)
        for (int64_t j = 0; j < in->count; ++j)
            copy_key(*in, in->layers[i], in->source_rows[j], in->target_rows[j]);
    return 1;
}

// Returns 1; or 0 with nothing written if a slot or a row id does not exist. Without keys, rows
// alone.
ESS_EXPORT int32_t ess_append(const ess::Append* in) {
    if (!all_below(in->slots, in->count, in->slot_count)) return 0;
    if (in->keys && !all_below(in->row_ids, in->count, in->page_count * 64)) return 0;
    for (int64_t i = 0; i < in->count; ++i)
        request(in->slab + in->slots[i] * in->row_bytes, in->row_bytes);
    for (int64_t i = 0; i < in->count; ++i) {
        uint8_t* slot = in->slab + in->slots[i] * in->row_bytes;
        std::memcpy(slot, in->rows + i * in->row_bytes, in->row_bytes);
        if (in->keys) write_key(*in, i);
    }
    return 1;
}

// Sets the bits of `rows` in the masks of these layers. 1; or 0 with nothing marked.
ESS_EXPORT int32_t ess_mark(uint64_t* masks, const int32_t* layers, const int32_t* rows,
                            int64_t layer_max, int64_t page_count, int64_t layer_count,
                            int64_t count) {
    if (!all_below(layers, layer_count, layer_max) || !all_below(rows, count, page_count * 64))
        return 0;
    for (int64_t i = 0; i < layer_count; ++i)
        for (int64_t j = 0; j < count; ++j)
            masks[layers[i] * page_count + (rows[j] >> 6)] |= uint64_t(1) << (rows[j] & 63);
    return 1;
}

// Returns 1; or 0 with nothing changed if a slot does not hold its new row. `keys.layers` is of
// each group. `counts` are the rows that each sequence has brought, then the rows that it keeps.
ESS_EXPORT int32_t ess_seal(const Seal* in, const int32_t* counts, int64_t sequence_count) {
    std::vector<uint8_t> kept;
    for (int64_t s = 0; s < sequence_count; ++s)
        for (int32_t i = 0; i < counts[s]; ++i) kept.push_back(i < counts[sequence_count + s]);
    if (int64_t(kept.size()) != in->keys.count) return 0;
    for (int64_t g = 0; g < in->group_count; ++g)
        if (!is_sound(*in, in->groups[g])) return 0;
    for (int64_t g = 0; g < in->group_count; ++g) {
        const Sealed& group = in->groups[g];
        in->left[g] = 0;
        for (int64_t i = 0; i < in->keys.count; ++i)
            if (kept[i] && in->writes) request_home(*in, group, in->keys.source_rows[i]);
        for (int64_t i = 0; i < in->keys.count; ++i) {
            const int32_t row = in->keys.source_rows[i], slot = group.slots[i];
            if (kept[i]) {
                send_home(*in, group, in->keys.layers[g], row, slot);
            } else {
                group.arena->leave(row, slot);
                group.arena->forget(row);
                in->left[g]++;
            }
        }
    }
    return 1;
}
