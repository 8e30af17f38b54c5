// Index keys from one set of pages to another, key by key: the native twin of KeyPages.copy_keys in
// ess/pool/keys.py. A page of a layer is 64 values, then 64 scales.
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
