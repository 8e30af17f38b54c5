// csrc/flashtrans/device.cuh for a CPU that plays a spiteful device, so that the very sources of
// the kernels can be run against their specifications where there is no GPU.
//
// The blocks of a grid run one after another in random order, those of a cluster at once. The
// threads of a block are fibers; a fiber runs until it waits at a barrier or a warp operation or,
// at random, before an atomic one; then another of its warp is drawn, and another warp, of any
// block of the cluster, when none of it can go on. Shared memory is poisoned before every block. A
// bulk load is poison until somebody waits for its arrival; a bulk store happens as late as the
// kernel's own waits allow. Not seen here: the order of memory between blocks that run at once.
#pragma once

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned char u8;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { i32 x, y, z; };

#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define ESS_KERNEL extern "C" void
#define ESS_CLUSTER(blocks)
#define ESS_SHARED static __attribute__((section("ess_shared")))
#define ESS_DYNAMIC_SHARED(name) u8* name = emulated::block.dynamic

extern u8 __start_ess_shared[] __attribute__((weak));
extern u8 __stop_ess_shared[] __attribute__((weak));

static Index blockIdx, threadIdx, gridDim, blockDim;

namespace emulated {

constexpr i32 kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr u8 kPoison = 0xFF;
#ifdef ESS_BLOCKS
constexpr i32 kClusterBlocks = ESS_BLOCKS;
#else
constexpr i32 kClusterBlocks = 1;
#endif

[[noreturn]] inline void fail(const char* sentence) {
    std::fprintf(stderr, "emulated device: %s\n", sentence);
    std::abort();
}

struct Store { void* to; const void* from; u32 bytes; };
struct Load { void* to; const void* from; u32 bytes; u64* arrival; };
enum class Mode { ready, at_barrier, at_cluster, at_warp, done };

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool started = false;
    Mode mode = Mode::ready;
    u32 turn = 0;
    std::vector<std::vector<Store>> committed;
    std::vector<Store> stores;
};

// A block, or all blocks of a cluster: then its fibers are those of the first, of the second, ...
struct Block {
    std::vector<Fiber> fibers;
    std::vector<u8> stacks;
    std::vector<u64> exchanged[2];
    std::vector<Load> loads;
    u8* dynamic = nullptr;
    void (*run)(const void*) = nullptr;
    const void* record = nullptr;
    jmp_buf scheduler;
    i32 current = 0;
    i32 done = 0;
    i32 cluster = 0;
    std::vector<u8> shared[kClusterBlocks];
    u64 random = 1;
};

static Block block;

inline u64 draw() {
    block.random ^= block.random << 13;
    block.random ^= block.random >> 7;
    block.random ^= block.random << 17;
    return block.random;
}

inline Fiber& self() { return block.fibers[block.current]; }

// ---- clusters: the blocks have the static shared memory in turn, as their threads do

inline size_t static_bytes() { return __stop_ess_shared - __start_ess_shared; }

inline void poison_shared() {
    for (auto& one : block.shared) one.assign(static_bytes(), kPoison);
    if (static_bytes()) std::memset(__start_ess_shared, kPoison, static_bytes());
}

inline void enter(i32 index) {
    const i32 before = blockIdx.x - block.cluster * kClusterBlocks, rank = index / blockDim.x;
    block.current = index;
    threadIdx = {index % blockDim.x, 0, 0};
    if (rank == before) return;
    blockIdx = {block.cluster * kClusterBlocks + rank, 0, 0};
    if (!static_bytes()) return;
    std::memcpy(block.shared[before].data(), __start_ess_shared, static_bytes());
    std::memcpy(__start_ess_shared, block.shared[rank].data(), static_bytes());
}

// The first thread of the block that runs.
inline i32 first_of_block() { return block.current / blockDim.x * blockDim.x; }

inline void leave(Mode mode) {
    i32 index = block.current;
    self().mode = mode;
    if (_setjmp(self().here) == 0) _longjmp(block.scheduler, 1);
    enter(index);
}

inline void perhaps_leave() {
    if (draw() % 4 == 0) leave(Mode::ready);
}

// Whoever comes last wakes all.
inline void meet(Mode mode, i32 first, i32 count) {
    self().mode = mode;
    for (i32 i = first; i < first + count; i++)
        if (block.fibers[i].mode != mode && block.fibers[i].mode != Mode::done) return leave(mode);
    for (i32 i = first; i < first + count; i++)
        if (block.fibers[i].mode == mode) block.fibers[i].mode = Mode::ready;
    leave(Mode::ready);
}

// Every lane gives one value and reads those of its warp.
inline const u64* exchange(u64 value) {
    i32 first = block.current / kLanes * kLanes;
    std::vector<u64>& table = block.exchanged[self().turn++ % 2];
    table[block.current] = value;
    meet(Mode::at_warp, first, kLanes);
    return table.data() + first;
}

inline void finish_load(const Load& load) {
    std::memcpy(load.to, load.from, load.bytes);
    ++*load.arrival;
}

inline void finish_stores(size_t left) {
    auto& groups = self().committed;
    while (groups.size() > left) {
        for (const Store& one : groups.front()) std::memcpy(one.to, one.from, one.bytes);
        groups.erase(groups.begin());
    }
}

inline void begin() {
    block.run(block.record);
    if (!self().stores.empty()) fail("a bulk store was never committed");
    for (auto& group : self().committed)
        if (!group.empty()) fail("a thread left before its bulk stores were written");
    self().mode = Mode::done;
    block.done++;
    _longjmp(block.scheduler, 1);
}

inline void resume(i32 index) {
    Fiber& fiber = block.fibers[index];
    enter(index);
    if (_setjmp(block.scheduler)) return;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = block.stacks.data() + index * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, begin, 0);
    setcontext(&fiber.start);
}

// Any lane of the warp that can go on, or -1.
inline i32 ready_lane(i32 warp, i32 threads) {
    const i32 start = i32(draw() % kLanes);
    for (i32 i = 0; i < kLanes; i++) {
        const i32 index = warp * kLanes + (start + i) % kLanes;
        if (index < threads && block.fibers[index].mode == Mode::ready) return index;
    }
    return -1;
}

// One warp runs as far as it can before another is drawn: warps drift apart as they do on a device.
inline void run_block(i32 threads) {
    poison_shared();
    block.fibers.assign(threads, Fiber());
    for (auto& table : block.exchanged) table.assign(threads, 0);
    block.done = 0;
    const i32 warps = (threads + kLanes - 1) / kLanes;
    i32 warp = i32(draw() % warps);
    while (block.done < threads) {
        i32 pick = draw() % 256 == 0 ? -1 : ready_lane(warp, threads);
        for (i32 left = warps; pick < 0 && left > 0; left--) {
            if (left == warps) warp = i32(draw() % warps);
            warp = (warp + 1) % warps;
            pick = ready_lane(warp, threads);
        }
        if (pick < 0) fail("threads wait for one another at different places");
        resume(pick);
    }
}

inline void launch(void (*run)(const void*), const void* record, i32 blocks, i32 threads,
                   i32 shared_bytes, u64 seed) {
    std::vector<u8> dynamic(shared_bytes + 128);
    block.random = seed * 2 + 1;
    block.run = run;
    block.record = record;
    block.stacks.resize(kClusterBlocks * threads * kStackBytes);
    block.dynamic = dynamic.data() + (128 - size_t(dynamic.data()) % 128);
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    if (blocks % kClusterBlocks) fail("a grid is not whole clusters");
    if (kClusterBlocks > 1 && shared_bytes) fail("clusters with dynamic shared memory");
    std::vector<i32> order(blocks / kClusterBlocks);
    for (i32 i = 0; i < i32(order.size()); i++) order[i] = i;
    for (i32 left = i32(order.size()); left > 0; left--) {
        i32 pick = i32(draw() % left);
        block.cluster = order[pick];
        blockIdx = {order[pick] * kClusterBlocks, 0, 0};
        order[pick] = order[left - 1];
        std::memset(block.dynamic, kPoison, shared_bytes);
        run_block(kClusterBlocks * threads);
        if (!block.loads.empty()) fail("a block left before its bulk loads had arrived");
    }
}

}  // namespace emulated

// A launch from Python: the record, the grid, the threads of a block, its shared bytes, a seed. The
// size of the record is for whoever must copy it.
#define ESS_EMULATE(kernel, Record)                                                             \
    extern "C" __attribute__((visibility("default"))) const i32 bytes_##kernel = sizeof(Record); \
    extern "C" __attribute__((visibility("default"))) void emulate_##kernel(                    \
        const Record* record, i32 blocks, i32 threads, i32 shared_bytes, u64 seed) {            \
        emulated::launch([](const void* at) { kernel(*(const Record*)at); }, record, blocks,    \
                         threads, shared_bytes, seed);                                          \
    }

// ---- what kernels call

inline void __syncthreads() {
    emulated::meet(emulated::Mode::at_barrier, emulated::first_of_block(), blockDim.x);
}

inline void cluster_barrier() {
    emulated::meet(emulated::Mode::at_cluster, 0, i32(emulated::block.fibers.size()));
}

inline void __syncwarp() { emulated::exchange(0); }

inline u32 __ballot_sync(u32, bool vote) {
    const u64* votes = emulated::exchange(vote);
    u32 mask = 0;
    for (i32 lane = 0; lane < emulated::kLanes; lane++) mask |= u32(votes[lane]) << lane;
    return mask;
}

inline u32 __match_any_sync(u32, i32 value) {
    const u64* values = emulated::exchange(u32(value));
    u32 mask = 0;
    for (i32 lane = 0; lane < emulated::kLanes; lane++)
        mask |= u32(values[lane] == u32(value)) << lane;
    return mask;
}

inline i32 __shfl_up_sync(u32, i32 value, u32 by) {
    const u64* values = emulated::exchange(u32(value));
    i32 lane = threadIdx.x % emulated::kLanes;
    return lane < i32(by) ? value : i32(values[lane - by]);
}

inline i32 __shfl_sync(u32, i32 value, i32 lane) {
    return i32(emulated::exchange(u32(value))[lane % emulated::kLanes]);
}

inline i32 __popc(u32 mask) { return __builtin_popcount(mask); }

template <typename T, typename U>
T atomicAdd(T* at, U value) {
    emulated::perhaps_leave();
    T before = *at;
    *at = before + T(value);
    return before;
}

inline i32 atomicMin(i32* at, i32 value) {
    emulated::perhaps_leave();
    i32 before = *at;
    *at = before < value ? before : value;
    return before;
}

inline i32 atomicMax(i32* at, i32 value) {
    emulated::perhaps_leave();
    i32 before = *at;
    *at = before > value ? before : value;
    return before;
}

inline i32 atomicExch(i32* at, i32 value) {
    emulated::perhaps_leave();
    i32 before = *at;
    *at = value;
    return before;
}

template <typename Unit>
Unit load_unit(const Unit* from) {
    if (size_t(from) % sizeof(Unit)) emulated::fail("a unit is loaded from an unaligned address");
    return *from;
}

template <typename Unit>
void store_unit(Unit* to, Unit unit) {
    if (size_t(to) % sizeof(Unit)) emulated::fail("a unit is stored at an unaligned address");
    *to = unit;
}

inline void arrival_init(u64* arrival) { *arrival = 0; }
inline void arrivals_ready() {}

inline void bulk_load(void* to, const void* from, u32 bytes, u64* arrival) {
    if (size_t(to) % 16 || size_t(from) % 16 || bytes % 16)
        emulated::fail("a bulk load is not in units of 16 bytes");
    std::memset(to, emulated::kPoison, bytes);
    emulated::block.loads.push_back({to, from, bytes, arrival});
}

inline void bulk_wait(u64* arrival, u32 parity) {
    auto& loads = emulated::block.loads;
    emulated::perhaps_leave();
    for (size_t i = 0; i < loads.size() && (*arrival & 1) == parity; i++) {
        if (loads[i].arrival != arrival) continue;
        emulated::finish_load(loads[i]);
        loads.erase(loads.begin() + i--);
    }
    if ((*arrival & 1) == parity) emulated::fail("a thread waits for a row that nobody loads");
}

inline void bulk_store(void* to, const void* from, u32 bytes) {
    if (size_t(to) % 16 || size_t(from) % 16 || bytes % 16)
        emulated::fail("a bulk store is not in units of 16 bytes");
    emulated::self().stores.push_back({to, from, bytes});
}

inline void bulk_commit() {
    emulated::self().committed.push_back(emulated::self().stores);
    emulated::self().stores.clear();
}

template <i32 left>
void bulk_wait_read() {
    emulated::finish_stores(left);
}

inline void bulk_wait_written() { emulated::finish_stores(0); }
