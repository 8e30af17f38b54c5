// What is asked of ids and positions before anything changes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../cpu/native.h"

namespace ess {

namespace {

inline __attribute__((always_inline)) bool in_range(const int32_t* ids, int64_t n, int32_t lowest,
                                                    int64_t bound) {
    uint32_t above = 0;
    for (int64_t i = 0; i < n; i++) above = std::max(above, uint32_t(ids[i]) - uint32_t(lowest));
    return n == 0 || int64_t(above) < bound - lowest;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool in_range_avx2(const int32_t* ids, int64_t n, int32_t lowest,
                                                   int64_t bound) {
    return in_range(ids, n, lowest, bound);
}
#endif

[[maybe_unused]] bool within(const int32_t* ids, int64_t n, int32_t lowest, int64_t bound) {
#if defined(__x86_64__)
    if (isa() != Isa::portable) return in_range_avx2(ids, n, lowest, bound);
#endif
    return in_range(ids, n, lowest, bound);
}

// Each position is above the one before it, and behind the last there is only -1, which as an
// unsigned number is above all of them.
inline __attribute__((always_inline)) bool in_order(const int32_t* position, int64_t n) {
    uint32_t wrong = 0;
    for (int64_t i = 1; i < n; i++) {
        const uint32_t here = uint32_t(position[i]), before = uint32_t(position[i - 1]);
        wrong |= uint32_t(here <= before) & uint32_t(here != UINT32_MAX);
    }
    return wrong == 0;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool in_order_avx2(const int32_t* position, int64_t n) {
    return in_order(position, n);
}
#endif

[[maybe_unused]] bool ascends(const int32_t* position, int64_t n) {
#if defined(__x86_64__)
    if (isa() != Isa::portable) return in_order_avx2(position, n);
#endif
    return in_order(position, n);
}

}  // namespace

}  // namespace ess
