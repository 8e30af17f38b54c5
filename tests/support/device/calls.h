// What kernels call, on the device that emulated.h plays.
#pragma once

inline void __syncthreads(ESS_LINE) {
    emulated::Hush hush;
    emulated::meet(emulated::Mode::at_barrier, emulated::first_of_block(), blockDim.x, line);
}

// How many of the block's threads say so; those that have left say nothing.
inline i32 __syncthreads_count(bool vote, ESS_LINE) {
    emulated::Hush hush;
    emulated::Fiber& self = emulated::self();
    const u32 turn = ++self.count_turn;
    auto& table = emulated::block.counted[turn % 2];
    table[emulated::block.current] = {vote, turn};
    const i32 first = emulated::first_of_block();
    emulated::meet(emulated::Mode::at_barrier, first, blockDim.x, line);
    i32 count = 0;
    for (i32 i = first; i < first + blockDim.x; i++)
        count += table[i].turn == turn && table[i].value != 0;
    return count;
}

inline void cluster_barrier(ESS_LINE) {
    emulated::Hush hush;
    emulated::meet(emulated::Mode::at_cluster, 0, i32(emulated::block.fibers.size()), line);
}

inline void __syncwarp(u32 mask = ~0u, ESS_LINE) {
    emulated::Hush hush;
    emulated::exchange(0, mask, line, emulated::Mode::at_warp);
}

// The lanes whose value passes.
template <typename Passes>
u32 lanes_that(u64 value, u32 mask, emulated::Line line, Passes passes) {
    emulated::Hush hush;
    const emulated::Given* given = emulated::exchange(value, mask, line);
    u32 lanes = 0;
    for (i32 lane = 0; lane < emulated::kLanes; lane++)
        lanes |= u32(emulated::gave(given[lane]) && passes(given[lane].value)) << lane;
    return lanes;
}

inline u32 __ballot_sync(u32 mask, bool vote, ESS_LINE) {
    return lanes_that(vote, mask, line, [](u64 given) { return given != 0; });
}

inline u32 __match_any_sync(u32 mask, i32 value, ESS_LINE) {
    return lanes_that(u32(value), mask, line, [=](u64 given) { return given == u32(value); });
}

inline i32 value_of(u32 mask, i32 value, i32 lane, emulated::Line line) {
    const emulated::Given& given = emulated::exchange(u32(value), mask, line)[lane];
    if (!emulated::gave(given)) emulated::fail("a value is asked of a lane that has left");
    return i32(given.value);
}

inline i32 __shfl_up_sync(u32 mask, i32 value, u32 by, ESS_LINE) {
    emulated::Hush hush;
    const i32 lane = threadIdx.x % emulated::kLanes;
    return value_of(mask, value, lane < i32(by) ? lane : lane - i32(by), line);
}

inline i32 __shfl_sync(u32 mask, i32 value, i32 lane, ESS_LINE) {
    emulated::Hush hush;
    return value_of(mask, value, lane % emulated::kLanes, line);
}

inline u32 __reduce_add_sync(u32 mask, u32 value, ESS_LINE) {
    emulated::Hush hush;
    const emulated::Given* given = emulated::exchange(value, mask, line);
    u32 sum = 0;
    for (i32 lane = 0; lane < emulated::kLanes; lane++)
        sum += emulated::gave(given[lane]) ? u32(given[lane].value) : 0;
    return sum;
}

inline i32 __popc(u32 mask) { return __builtin_popcount(mask); }

// ---- sums and products that are rounded once each

inline float __fadd_rn(float one, float other) { return one + other; }
inline float __fsub_rn(float one, float other) { return one - other; }
inline float __fmul_rn(float one, float other) { return one * other; }
inline float __fdiv_rn(float one, float other) { return one / other; }

inline i32 __float_as_int(float from) {
    i32 bits;
    std::memcpy(&bits, &from, sizeof bits);
    return bits;
}

inline float __int_as_float(i32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
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

inline i32 load_relaxed(const i32* from) {
    emulated::Hush hush;
    emulated::perhaps_leave();
    watch_touch(watched::kAtomicRead, from, sizeof(i32));
    return *from;
}

inline void store_relaxed(i32* to, i32 value) {
    emulated::Hush hush;
    emulated::perhaps_leave();
    watch_touch(watched::kAtomicWrite, to, sizeof(i32));
    *to = value;
}

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
    emulated::self().new_arrivals.push_back(arrival);
}

inline void arrivals_ready() {
    emulated::Hush hush;
    emulated::self().new_arrivals.clear();
}

inline void check_bulk(const void* to, const void* from, u32 bytes) {
    if (size_t(to) % 16 || size_t(from) % 16 || bytes % 16)
        emulated::fail("a bulk copy is not in units of 16 bytes");
}

inline void bulk_load(void* to, const void* from, u32 bytes, u64* arrival) {
    emulated::Hush hush;
    check_bulk(to, from, bytes);
    if (size_t(arrival) % 8 || bytes >= 1u << 20)
        emulated::fail("an arrival lies at an odd address, or counts too much");
    for (u64* one : emulated::self().new_arrivals)
        if (one == arrival) emulated::fail("a barrier is used before the copy engine can see it");
    watch_touch(watched::kAtomicWrite, arrival, sizeof(u64));
    watch_touch(watched::kRead, from, bytes);
    watch_touch(watched::kWrite, to, bytes);
    std::memset(to, emulated::kPoison, bytes);
    emulated::block.loads.push_back({to, from, bytes, arrival});
}

inline void bulk_wait(u64* arrival, u32 parity) {
    emulated::Hush hush;
    auto& loads = emulated::block.loads;
    emulated::perhaps_leave();
    watch_touch(watched::kAtomicRead, arrival, sizeof(u64));
    for (size_t i = 0; i < loads.size() && (*arrival & 1) == parity; i++) {
        if (loads[i].arrival != arrival) continue;
        emulated::finish_load(loads[i]);
        loads.erase(loads.begin() + i--);
    }
    if ((*arrival & 1) == parity) emulated::fail("a thread waits for a row that no thread loads");
}

inline void bulk_store(void* to, const void* from, u32 bytes) {
    emulated::Hush hush;
    check_bulk(to, from, bytes);
    watch_touch(watched::kRead, from, bytes);
    watch_touch(watched::kWrite, to, bytes);
    emulated::self().stores.push_back({to, from, bytes});
}

inline void bulk_commit() {
    emulated::Hush hush;
    emulated::self().committed.push_back(emulated::self().stores);
    emulated::self().stores.clear();
}

template <i32 left>
void bulk_wait_read() {
    emulated::Hush hush;
    emulated::finish_stores(left);
}

inline void bulk_wait_written() {
    emulated::Hush hush;
    emulated::finish_stores(0);
}
