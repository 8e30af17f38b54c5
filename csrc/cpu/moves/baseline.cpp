// What the row movers are measured against: the loop that first comes to mind.
#include <cstring>

#include "../native.h"
#include "rows.h"

// Indices are trusted; pairs with -1 are skipped.
ESS_EXPORT void ess_rows_memcpy_loop(const ess::RowCopy* copy) {
    for (int64_t i = 0; i < copy->count; ++i) {
        const int64_t from = copy->source.row(i), to = copy->target.row(i);
        if (from < 0 || to < 0) continue;
        std::memcpy(copy->target.base + to * copy->target.stride,
                    copy->source.base + from * copy->source.stride, copy->row_bytes);
    }
}
