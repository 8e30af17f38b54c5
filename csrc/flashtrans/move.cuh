// Rows of one matrix to rows of another: what every way of moving them is told.
#pragma once

#include "device.cuh"

#if ESS_UNIT_BYTES == 16
typedef uint4 Unit;
#elif ESS_UNIT_BYTES == 8
typedef uint2 Unit;
#else
typedef u32 Unit;
#endif

// Row source_rows[i] of `source` goes to row target_rows[i] of `target`; no list means 0, 1, 2, ...
// and -1 skips the pair. `count` lies on the device, so that a graph can be replayed with other
// selections; without it all `count_max` pairs move. Addresses are 64 bits wide: a pool is larger
// than 4 GiB, and than 2^31 rows times bytes. `lines_of` is 1 where the target's memory is the
// farther one, and 0 where the source's is.
struct Move {
    const u8* source;
    const i32* source_rows;
    i64 source_stride;
    u8* target;
    const i32* target_rows;
    i64 target_stride;
    const i32* count;
    i64 count_max;
    i64 lines_of;

    __device__ i32 pair_count() const {
        if (count == nullptr || *count > count_max) return i32(count_max);
        return *count;
    }

    __device__ i32 source_row(i32 pair) const {
        return source_rows == nullptr ? pair : source_rows[pair];
    }

    __device__ i32 target_row(i32 pair) const {
        return target_rows == nullptr ? pair : target_rows[pair];
    }

    __device__ const u8* source_at(i32 row) const { return source + row * source_stride; }

    __device__ u8* target_at(i32 row) const { return target + row * target_stride; }
};
