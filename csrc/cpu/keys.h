// What a layer makes of a step's tokens, on its way into slots and active pages.
#pragma once

#include "native.h"

namespace ess {

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

}  // namespace ess

ESS_EXPORT int32_t ess_append(const ess::Append* in);
