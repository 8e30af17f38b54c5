// How plain values become the bytes of rows and index keys; codec.cpp does it.
#pragma once

#include "native.h"

namespace ess {

// How rows lie in memory; strides in bytes. A key is a row with one group and no tail.
struct Strides {
    int64_t row_count;
    int64_t group_count;
    int64_t group_size;
    int64_t tail_count;    // plain values behind the groups
    int64_t power_of_two;  // scales are rounded up to one
    int64_t value_is_bf16;  // the plain side, else f32
    int64_t value_stride;
    int64_t row_stride;  // of codes and tail
    int64_t scale_stride;
    int64_t scale_is_byte;  // a power of two as its exponent; else f32
};

// One row or key: its strides, and where scales and tail lie behind the first code.
struct Encoding {
    Strides strides;
    int64_t scale_at;
    int64_t tail_at;
};

}  // namespace ess

ESS_EXPORT void ess_codec_encode(const ess::Strides* form, const char* values, uint8_t* codes,
                                 char* scales, char* tail);
