// csrc/flashtrans/device.cuh for a CPU that plays a spiteful device, so that the very sources of
// the kernels can be run against their specifications where there is no GPU.
//
// The blocks of a grid run one after another in random order, those of a cluster at once. The
// threads of a block are fibers; a fiber runs until it waits at a barrier or a warp operation or,
// at random, before an atomic one; then another of its warp is drawn, and another warp, of any
// block of the cluster, when none of it can go on. Shared memory is poisoned before every block. A
// bulk load is poison until a thread waits for its arrival; a bulk store happens as late as the
// kernel's own waits allow. A barrier and a warp operation wait for all threads that have not left,
// as since sm_70, and all must come to the same one.
//
// Blocks do not run at once; watch.h finds what would go wrong if they did, and strays.
#pragma once

#include "heads.h"
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

// Where in the sources a thread is.
struct Line {
    const char* file;
    i32 number;

    bool operator==(Line other) const { return file == other.file && number == other.number; }
};

#define ESS_LINE emulated::Line line = {__builtin_FILE(), __builtin_LINE()}

struct Store { void* to; const void* from; u32 bytes; };
struct Load { void* to; const void* from; u32 bytes; u64* arrival; };
enum class Mode { ready, at_barrier, at_cluster, at_warp, at_vote, done };

// A thread. Those of the next block run on the fibers of the one before: to start a fiber asks the
// system twice.
struct Fiber {
    jmp_buf here;
    bool started = false;
    Mode mode = Mode::ready;
    Line line = {};
    u32 turn = 0, count_turn = 0;
    std::vector<u64*> new_arrivals;
    std::vector<std::vector<Store>> committed;
    std::vector<Store> stores;

    void renew() {
        mode = Mode::ready;
        line = {};
        turn = count_turn = 0;
        new_arrivals.clear();
        committed.clear();
        stores.clear();
    }
};

// Lines that lanes have loaded from: a warp asks once for what its lanes want of a line at a time,
// and comes past a line at one time only, if no two rows of the call share it.
#ifdef ESS_COUNT_REQUESTS
struct Asked {
    i32 block, thread;
    u64 line;
};
static std::vector<Asked> asked;

inline void requested(const void* at) {
    asked.push_back({blockIdx.x, threadIdx.x, u64(at) / 128});
}

extern "C" __attribute__((visibility("default"))) i64 emulated_requests(i32 lanes) {
    std::set<std::tuple<i32, i32, u64>> requests;
    for (const Asked& one : asked) requests.insert({one.block, one.thread / lanes, one.line});
    asked.clear();
    return i64(requests.size());
}
#else
inline void requested(const void*) {}
#endif

// What a lane gave to its warp, and in which turn: one that has left gave nothing.
struct Given {
    u64 value;
    u32 turn;
};

// A block, or all blocks of a cluster: then its fibers are those of the first, of the second, ...
struct Block {
    std::vector<Fiber> fibers;
    std::unique_ptr<u8[]> stacks;
    size_t stack_count = 0;
    std::vector<Given> exchanged[2], counted[2];
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
    std::string failure;
};

static Block block;

// While the device works for a kernel, what it touches is its own.
struct Hush {
    bool before = watch_hush(true);
    ~Hush() { watch_hush(before); }
};

// A thread ends the launch.
[[noreturn]] inline void fail(const char* sentence) {
    watch_hush(true);
    block.failure = sentence;
    _longjmp(block.scheduler, 1);
}

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
    blockIdx = {block.cluster * kClusterBlocks + rank, 0, 0};
    watch_thread(blockIdx.x, threadIdx.x);
    if (rank == before) return;
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

inline std::string text_of(Line line) {
    const char* name = std::strrchr(line.file, '/');
    return std::string(name ? name + 1 : line.file) + ":" + std::to_string(line.number);
}

[[noreturn]] inline void fail_apart(Line one, Line other) {
    const std::string lines = text_of(one) + " and " + text_of(other);
    fail(("threads meet that wait at different places: " + lines).c_str());
}

// The thread that comes or leaves last wakes all that wait. Votes and shuffles wait for a warp as
// well, but order no memory.
inline void wake(Mode mode, i32 first, i32 count) {
    for (i32 i = first; i < first + count; i++)
        if (block.fibers[i].mode != mode && block.fibers[i].mode != Mode::done) return;
    const Line* line = nullptr;
    for (i32 i = first; i < first + count; i++) {
        Fiber& fiber = block.fibers[i];
        if (fiber.mode != mode) continue;
        if (line && !(*line == fiber.line)) fail_apart(*line, fiber.line);
        line = &fiber.line;
        fiber.mode = Mode::ready;
    }
    const watched::Scope scope = mode == Mode::at_warp      ? watched::kWarp
                                 : mode == Mode::at_barrier ? watched::kBlock
                                                            : watched::kCluster;
    if (line && mode != Mode::at_vote) watch_met(scope, blockIdx.x, first % blockDim.x);
}

inline void meet(Mode mode, i32 first, i32 count, Line line) {
    self().mode = mode;
    self().line = line;
    wake(mode, first, count);
    leave(self().mode);
}

// Every lane gives one value and reads those of its warp.
inline const Given* exchange(u64 value, u32 mask, Line line, Mode mode = Mode::at_vote) {
    if (mask != ~0u) fail("a warp operation names a part of the warp, which is not played here");
    i32 first = block.current / kLanes * kLanes;
    std::vector<Given>& table = block.exchanged[++self().turn % 2];
    table[block.current] = {value, self().turn};
    meet(mode, first, kLanes, line);
    return table.data() + first;
}

inline bool gave(const Given& given) { return given.turn == self().turn; }

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

inline void run_thread() {
    watch_hush(false);
    block.run(block.record);
    watch_hush(true);
    if (!self().stores.empty()) fail("a bulk store was never committed");
    for (auto& group : self().committed)
        if (!group.empty()) fail("a thread left before its bulk stores were written");
    self().mode = Mode::done;
    watch_left();
    block.done++;
    wake(Mode::at_warp, block.current / kLanes * kLanes, kLanes);
    wake(Mode::at_vote, block.current / kLanes * kLanes, kLanes);
    wake(Mode::at_barrier, first_of_block(), blockDim.x);
    wake(Mode::at_cluster, 0, i32(block.fibers.size()));
}

inline void begin() {
    for (;;) {
        run_thread();
        if (_setjmp(self().here) == 0) _longjmp(block.scheduler, 1);
    }
}

inline void resume(i32 index) {
    Fiber& fiber = block.fibers[index];
    enter(index);
    if (_setjmp(block.scheduler)) return;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = block.stacks.get() + index * kStackBytes;
    start.uc_stack.ss_size = kStackBytes;
    start.uc_link = nullptr;
    makecontext(&start, begin, 0);
    setcontext(&start);
}

// After a failure threads stand where they were, so all begin anew, as where their stacks move.
inline void make_fibers(size_t count) {
    if (count > block.stack_count) {
        block.stacks.reset(new u8[count * kStackBytes]);
        block.stack_count = count;
        block.fibers.clear();
    }
    if (!block.failure.empty()) block.fibers.clear();
    block.fibers.resize(count);
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

// Of each place where threads wait, the first that does.
inline std::string whereabouts() {
    std::string text;
    for (size_t i = 0; i < block.fibers.size(); i++) {
        const std::string line = text_of(block.fibers[i].line);
        if (block.fibers[i].mode == Mode::done || text.find(line) != text.npos) continue;
        text += (text.empty() ? "thread " : ", thread ") + std::to_string(i) + " at " + line;
    }
    return text;
}

// One warp runs as far as it can before another is drawn: warps drift apart as they do on a device.
inline void run_block(i32 threads) {
    poison_shared();
    watch_shared(__start_ess_shared, static_bytes());
    for (Fiber& fiber : block.fibers) fiber.renew();
    for (auto& table : block.exchanged) table.assign(threads, Given());
    for (auto& table : block.counted) table.assign(threads, Given());
    block.done = 0;
    const i32 warps = (threads + kLanes - 1) / kLanes;
    i32 warp = i32(draw() % warps);
    while (block.done < threads && block.failure.empty()) {
        i32 pick = draw() % 256 == 0 ? -1 : ready_lane(warp, threads);
        for (i32 left = warps; pick < 0 && left > 0; left--) {
            if (left == warps) warp = i32(draw() % warps);
            warp = (warp + 1) % warps;
            pick = ready_lane(warp, threads);
        }
        if (pick < 0) block.failure = "threads wait for one another: " + whereabouts();
        else resume(pick);
    }
}

// What a kernel may read that is neither its arrays' nor shared.
inline void show_own_memory(const void* record, i32 record_bytes) {
    watch_private(block.stacks.get(), block.stack_count * kStackBytes);
    watch_private(record, record_bytes);
    watch_private(&block, sizeof(Block));
    for (const Index* one : {&blockIdx, &threadIdx, &gridDim, &blockDim})
        watch_private(one, sizeof(Index));
}

// What went wrong, or null.
inline const char* launch(const char* kernel, void (*run)(const void*), const void* record,
                          i32 record_bytes, i32 blocks, i32 threads, i32 shared_bytes, u64 seed) {
    std::vector<u8> dynamic(shared_bytes + 128);
    block.random = seed * 2 + 1;
    block.run = run;
    block.record = record;
    make_fibers(size_t(kClusterBlocks) * threads);
    block.failure.clear();
    block.loads.clear();
    block.dynamic = dynamic.data() + (128 - size_t(dynamic.data()) % 128);
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    if (blocks % kClusterBlocks) return "a grid is not whole clusters";
    if (kClusterBlocks > 1 && shared_bytes) return "clusters with dynamic shared memory";
    watch_launch(kernel, blocks, kClusterBlocks, threads, fail);
    show_own_memory(record, record_bytes);
    std::vector<i32> order(blocks / kClusterBlocks);
    for (i32 i = 0; i < i32(order.size()); i++) order[i] = i;
    for (i32 left = i32(order.size()); left > 0 && block.failure.empty(); left--) {
        i32 pick = i32(draw() % left);
        block.cluster = order[pick];
        blockIdx = {order[pick] * kClusterBlocks, 0, 0};
        order[pick] = order[left - 1];
        std::memset(block.dynamic, kPoison, shared_bytes);
        watch_shared(block.dynamic, shared_bytes);
        run_block(kClusterBlocks * threads);
        if (block.failure.empty() && !block.loads.empty())
            block.failure = "a block left before its bulk loads had arrived";
    }
    return block.failure.empty() ? nullptr : block.failure.c_str();
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) const i32 cluster_blocks =
    emulated::kClusterBlocks;

// A launch from Python: the record, the grid, the threads of a block, its shared bytes, a seed. It
// returns what went wrong, or null. The size of the record is for the caller that must copy it.
#define ESS_EMULATE(kernel, Record)                                                             \
    static_assert(sizeof(Record) <= 4096, "arguments of a kernel");                              \
    extern "C" __attribute__((visibility("default"))) const i32 bytes_##kernel = sizeof(Record); \
    extern "C" __attribute__((visibility("default"))) const char* emulate_##kernel(             \
        const Record* record, i32 blocks, i32 threads, i32 shared_bytes, u64 seed) {            \
        return emulated::launch(                                                                \
            #kernel, [](const void* at) { kernel(*(const Record*)at); }, record, sizeof(Record), \
            blocks, threads, shared_bytes, seed);                                               \
    }

#include "calls.h"
