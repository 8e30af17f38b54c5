// One call for many small rows. Shared by the direct call (rows.cpp) and the copy lane (lane.cpp).
#pragma once

#include <cstdint>

namespace ess {

// One side of a copy. Without a list (index_bytes 0) row i of the copy is row i of the matrix;
// with one (int32 or int64) it is row list[i], and -1 skips the pair on both sides.
struct RowSide {
    uint8_t* base;
    int64_t stride;
    int64_t row_count;
    const void* list;
    int64_t index_bytes;

    int64_t row(int64_t i) const {
        if (index_bytes == 0) return i;
        return index_bytes == 4 ? static_cast<const int32_t*>(list)[i]
                                : static_cast<const int64_t*>(list)[i];
    }
};

// The ctypes twin is NativeCopy of ess/flashtrans/rows.py.
struct RowCopy {
    RowSide source;
    RowSide target;
    int64_t count;
    int64_t row_bytes;
};

// What the door reports about the first bad index: which copy, which side, where, which row.
struct Fault {
    int64_t copy;
    int64_t side;  // 0 source, 1 target
    int64_t place;
    int64_t row;
};

// True, with `fault` filled in, if any index lies outside -1 .. row_count - 1.
bool find_fault(const RowCopy* copies, int64_t copy_count, Fault* fault);

// A copy for a caller that can hand over one pointer only. The lists have been checked.
struct RowJob {
    RowCopy copy;
    int64_t threads;
    int64_t stream_above;
};

// Copies whose targets take more than `stream_above` bytes bypass the caches.
void copy_rows(const RowCopy& copy, int threads, int64_t stream_above);

}  // namespace ess
