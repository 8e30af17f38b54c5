// One driver call a row, for the benchmark alone: the loop that FlashTrans replaces.
#include <cstddef>
#include <cstdint>

typedef int (*Copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);

extern "C" int ess_memcpy_loop(Copy copy, uint64_t to, uint64_t from, const int32_t* to_rows,
                               const int32_t* from_rows, int64_t count, int64_t row_bytes,
                               void* stream) {
    for (int64_t i = 0; i < count; i++) {
        int status = copy(to + to_rows[i] * row_bytes, from + from_rows[i] * row_bytes,
                          size_t(row_bytes), stream);
        if (status) return status;
    }
    return 0;
}
