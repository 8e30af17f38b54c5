// What kernels call on the device that emulated.h describes, and what calls kernels.
#pragma once

#include "watch.h"

typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Index { i32 x, y, z; };

extern Index blockIdx, threadIdx, gridDim, blockDim;

namespace emulated {

// Where in the sources a thread is.
struct Line {
    const char* file;
    i32 number;

    bool operator==(Line other) const { return file == other.file && number == other.number; }
};

#define ESS_LINE emulated::Line line = {__builtin_FILE(), __builtin_LINE()}

// While the device works for a kernel, what it touches is its own.
struct Hush {
    bool before = watch_hush(true);
    ~Hush() { watch_hush(before); }
};

u8* dynamic_shared();
void perhaps_leave();
void requested(const void* at);
void new_arrival(u64* arrival);
void write_stores(size_t left);

struct Grid { i32 blocks, cluster_blocks, threads, shared_bytes; };

// What went wrong, or null.
const char* launch(const char* kernel, void (*run)(const void*), const void* record,
                   i32 record_bytes, Grid grid, u64 seed);

}  // namespace emulated

void __syncthreads(ESS_LINE);
// How many of the block's threads say so; those that have left say nothing.
i32 __syncthreads_count(bool vote, ESS_LINE);
void cluster_barrier(ESS_LINE);
void __syncwarp(u32 mask = ~0u, ESS_LINE);
u32 __ballot_sync(u32 mask, bool vote, ESS_LINE);
u32 __match_any_sync(u32 mask, i32 value, ESS_LINE);
i32 __shfl_up_sync(u32 mask, i32 value, u32 by, ESS_LINE);
i32 __shfl_sync(u32 mask, i32 value, i32 lane, ESS_LINE);
u32 __reduce_add_sync(u32 mask, u32 value, ESS_LINE);

inline i32 __popc(u32 mask) { return __builtin_popcount(mask); }

// ---- sums and products that are rounded once each

inline float __fadd_rn(float one, float other) { return one + other; }
inline float __fsub_rn(float one, float other) { return one - other; }
inline float __fmul_rn(float one, float other) { return one * other; }
inline float __fdiv_rn(float one, float other) { return one / other; }

inline i32 __float_as_int(float from) {
    i32 bits;
    __builtin_memcpy(&bits, &from, sizeof bits);
    return bits;
}

inline float __int_as_float(i32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// Replaces a word by what `change` makes of it, at once.
template <typename T, typename Change>
T atomically(T* at, Change change) {
    emulated::Hush hush;
    emulated::perhaps_leave();
    watch_touch(watched::kAtomicRead, at, sizeof(T));
    watch_touch(watched::kAtomicWrite, at, sizeof(T));
    const T before = *at;
    *at = change(before);
    return before;
}

template <typename T, typename U>
T atomicAdd(T* at, U value) {
    return atomically(at, [=](T before) { return before + T(value); });
}

inline i32 atomicMin(i32* at, i32 value) {
    return atomically(at, [=](i32 before) { return before < value ? before : value; });
}

inline i32 atomicMax(i32* at, i32 value) {
    return atomically(at, [=](i32 before) { return before > value ? before : value; });
}

inline i32 atomicExch(i32* at, i32 value) {
    return atomically(at, [=](i32) { return value; });
}

i32 load_relaxed(const i32* from);
void store_relaxed(i32* to, i32 value);

// Streams do nothing while the host queues, so there is nothing to wait for.
inline void wait_for_host(const i32* word, i64) { load_relaxed(word); }

// The compiler may take a unit apart: what a device does in one piece is told as one.
template <typename Unit>
Unit load_unit(const Unit* from) {
    watch_constant(from, sizeof(Unit));
    emulated::Hush hush;
    emulated::requested(from);
    return *from;
}

template <typename Unit>
void store_unit(Unit* to, Unit unit) {
    watch_touch(watched::kWrite, to, sizeof(Unit));
    emulated::Hush hush;
    *to = unit;
}

inline void arrival_init(u64* arrival) {
    *arrival = 0;
    emulated::Hush hush;
    emulated::new_arrival(arrival);
}

void arrivals_ready();
void bulk_load(void* to, const void* from, u32 bytes, u64* arrival);
void bulk_wait(u64* arrival, u32 parity);
void bulk_store(void* to, const void* from, u32 bytes);
void bulk_commit();
void bulk_wait_written();

template <i32 left>
void bulk_wait_read() {
    emulated::Hush hush;
    emulated::write_stores(left);
}
