// What a step makes: its new rows and index keys into slots and active pages, then home to the host.
// The native twins of transit.write_new, KeyPages.copy_keys and LatentPool.mark_*. A page of keys of
// a layer is 64 values, then 64 scales; a key that comes alone is its value, then its scale.
#include <cstring>

#include "native.h"

namespace {

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

    uint8_t* page(const KeyPages& pages, int64_t layer, int64_t page) const {
        return pages.base + (layer * pages.page_count + page) * 64 * (value_bytes + scale_bytes);
    }
};

void copy_key(const KeyCopy& in, int64_t layer, int64_t from_row, int64_t to_row) {
    const uint8_t* from = in.page(in.source, layer, from_row >> 6);
    uint8_t* to = in.page(in.target, layer, to_row >> 6);
    const int64_t here = from_row & 63, there = to_row & 63, split = 64 * in.value_bytes;
    std::memcpy(to + there * in.value_bytes, from + here * in.value_bytes, in.value_bytes);
    std::memcpy(to + split + there * in.scale_bytes, from + split + here * in.scale_bytes,
                in.scale_bytes);
}

// Rows [count, row_bytes] and keys [count, value_bytes + scale_bytes] of one layer; `slab` and
// `pages` begin where this layer's do.
struct Append {
    uint8_t* slab;
    int64_t slot_count;
    const int32_t* slots;
    const uint8_t* rows;
    int64_t row_bytes;
    int64_t count;
    uint8_t* pages;
    int64_t page_count;
    const int32_t* row_ids;
    const uint8_t* keys;
    int64_t value_bytes;
    int64_t scale_bytes;
};

void write_key(const Append& in, int64_t i) {
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

}  // namespace

// 1; or 0 with nothing copied: a row or a layer that is not there.
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

// 1; or 0 with nothing written: a slot or a row id that is not there. Without keys, rows alone.
ESS_EXPORT int32_t ess_append(const Append* in) {
    if (!all_below(in->slots, in->count, in->slot_count)) return 0;
    if (in->keys && !all_below(in->row_ids, in->count, in->page_count * 64)) return 0;
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
