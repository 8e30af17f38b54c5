// The device that emulated.h describes: nothing watches what it does, and all kernels share it.
#include "calls.h"

#include <csetjmp>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <vector>

extern u8 __start_ess_shared[] __attribute__((weak));
extern u8 __stop_ess_shared[] __attribute__((weak));

Index blockIdx, threadIdx, gridDim, blockDim;

namespace emulated {

constexpr i32 kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr u8 kPoison = 0xFF;

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
    i32 current = 0, done = 0;
    i32 cluster = 0, cluster_blocks = 1;
    std::vector<std::vector<u8>> shared;
    u64 random = 1;
    std::string failure;
};

Block block;

// A thread ends the launch.
[[noreturn]] void fail(const char* sentence) {
    watch_hush(true);
    block.failure = sentence;
    _longjmp(block.scheduler, 1);
}

u64 draw() {
    block.random ^= block.random << 13;
    block.random ^= block.random >> 7;
    block.random ^= block.random << 17;
    return block.random;
}

Fiber& self() { return block.fibers[block.current]; }

// ---- clusters: the blocks have the static shared memory in turn, as their threads do

size_t static_bytes() { return __stop_ess_shared - __start_ess_shared; }

void poison_shared() {
    for (auto& one : block.shared) one.assign(static_bytes(), kPoison);
    if (static_bytes()) std::memset(__start_ess_shared, kPoison, static_bytes());
}

void enter(i32 index) {
    const i32 before = blockIdx.x - block.cluster * block.cluster_blocks, rank = index / blockDim.x;
    block.current = index;
    threadIdx = {index % blockDim.x, 0, 0};
    blockIdx = {block.cluster * block.cluster_blocks + rank, 0, 0};
    watch_thread(blockIdx.x, threadIdx.x);
    if (rank == before || !static_bytes()) return;
    std::memcpy(block.shared[before].data(), __start_ess_shared, static_bytes());
    std::memcpy(__start_ess_shared, block.shared[rank].data(), static_bytes());
}

// The first thread of the block that runs.
i32 first_of_block() { return block.current / blockDim.x * blockDim.x; }

void leave(Mode mode) {
    i32 index = block.current;
    self().mode = mode;
    if (_setjmp(self().here) == 0) _longjmp(block.scheduler, 1);
    enter(index);
}

void perhaps_leave() {
    if (draw() % 4 == 0) leave(Mode::ready);
}

std::string text_of(Line line) {
    const char* name = std::strrchr(line.file, '/');
    return std::string(name ? name + 1 : line.file) + ":" + std::to_string(line.number);
}

[[noreturn]] void fail_apart(Line one, Line other) {
    const std::string lines = text_of(one) + " and " + text_of(other);
    fail(("threads meet that wait at different places: " + lines).c_str());
}

// The thread that comes or leaves last wakes all that wait. Votes and shuffles wait for a warp as
// well, but order no memory.
void wake(Mode mode, i32 first, i32 count) {
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

void meet(Mode mode, i32 first, i32 count, Line line) {
    self().mode = mode;
    self().line = line;
    wake(mode, first, count);
    leave(self().mode);
}

// Every lane gives one value and reads those of its warp.
const Given* exchange(u64 value, u32 mask, Line line, Mode mode = Mode::at_vote) {
    if (mask != ~0u) fail("a warp operation names a part of the warp, which is not played here");
    i32 first = block.current / kLanes * kLanes;
    std::vector<Given>& table = block.exchanged[++self().turn % 2];
    table[block.current] = {value, self().turn};
    meet(mode, first, kLanes, line);
    return table.data() + first;
}

bool gave(const Given& given) { return given.turn == self().turn; }

void finish_load(const Load& load) {
    std::memcpy(load.to, load.from, load.bytes);
    ++*load.arrival;
}

void write_stores(size_t left) {
    auto& groups = self().committed;
    while (groups.size() > left) {
        for (const Store& one : groups.front()) std::memcpy(one.to, one.from, one.bytes);
        groups.erase(groups.begin());
    }
}

void run_thread() {
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

void begin() {
    for (;;) {
        run_thread();
        if (_setjmp(self().here) == 0) _longjmp(block.scheduler, 1);
    }
}

void resume(i32 index) {
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
void make_fibers(size_t count) {
    if (count > block.stack_count) {
        block.stacks.reset(new u8[count * kStackBytes]);
        block.stack_count = count;
        block.fibers.clear();
    }
    if (!block.failure.empty()) block.fibers.clear();
    block.fibers.resize(count);
}

// Any lane of the warp that can go on, or -1.
i32 ready_lane(i32 warp, i32 threads) {
    const i32 start = i32(draw() % kLanes);
    for (i32 i = 0; i < kLanes; i++) {
        const i32 index = warp * kLanes + (start + i) % kLanes;
        if (index < threads && block.fibers[index].mode == Mode::ready) return index;
    }
    return -1;
}

// Of each place where threads wait, the first that does.
std::string whereabouts() {
    std::string text;
    for (size_t i = 0; i < block.fibers.size(); i++) {
        const std::string line = text_of(block.fibers[i].line);
        if (block.fibers[i].mode == Mode::done || text.find(line) != text.npos) continue;
        text += (text.empty() ? "thread " : ", thread ") + std::to_string(i) + " at " + line;
    }
    return text;
}

// One warp runs as far as it can before another is drawn: warps drift apart as they do on a device.
void run_block(i32 threads) {
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
void show_own_memory(const void* record, i32 record_bytes) {
    watch_private(block.stacks.get(), block.stack_count * kStackBytes);
    watch_private(record, record_bytes);
    for (const Index* one : {&blockIdx, &threadIdx, &gridDim, &blockDim})
        watch_private(one, sizeof(Index));
}

const char* launch(const char* kernel, void (*run)(const void*), const void* record,
                   i32 record_bytes, Grid grid, u64 seed) {
    const auto [blocks, cluster_blocks, threads, shared_bytes] = grid;
    std::vector<u8> dynamic(shared_bytes + 128);
    block.random = seed * 2 + 1;
    block.run = run;
    block.record = record;
    block.cluster_blocks = cluster_blocks;
    block.shared.resize(cluster_blocks);
    make_fibers(size_t(cluster_blocks) * threads);
    block.failure.clear();
    block.loads.clear();
    block.dynamic = dynamic.data() + (128 - size_t(dynamic.data()) % 128);
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    if (blocks % cluster_blocks) return "a grid is not whole clusters";
    if (cluster_blocks > 1 && shared_bytes) return "clusters with dynamic shared memory";
    watch_launch(kernel, blocks, cluster_blocks, threads, fail);
    show_own_memory(record, record_bytes);
    std::vector<i32> order(blocks / cluster_blocks);
    for (i32 i = 0; i < i32(order.size()); i++) order[i] = i;
    for (i32 left = i32(order.size()); left > 0 && block.failure.empty(); left--) {
        i32 pick = i32(draw() % left);
        block.cluster = order[pick];
        blockIdx = {order[pick] * cluster_blocks, 0, 0};
        order[pick] = order[left - 1];
        std::memset(block.dynamic, kPoison, shared_bytes);
        watch_shared(block.dynamic, shared_bytes);
        run_block(cluster_blocks * threads);
        if (block.failure.empty() && !block.loads.empty())
            block.failure = "a block left before its bulk loads had arrived";
    }
    return block.failure.empty() ? nullptr : block.failure.c_str();
}

// Lines that lanes have loaded from: a warp asks once for what its lanes want of a line at a time,
// and comes past a line at one time only, if no two rows of the call share it.
struct Asked {
    i32 block, thread;
    u64 line;
};

std::vector<Asked> asked;
bool is_counting = false;

void requested(const void* at) {
    if (is_counting) asked.push_back({blockIdx.x, threadIdx.x, u64(at) / 128});
}

u8* dynamic_shared() { return block.dynamic; }

void new_arrival(u64* arrival) { self().new_arrivals.push_back(arrival); }

}  // namespace emulated

using namespace emulated;

extern "C" __attribute__((visibility("default"))) void emulated_count() {
    asked.clear(), is_counting = true;  // none of a launch that has failed
}

// How often `lanes` neighbours have asked for a line since `emulated_count`, in all.
extern "C" __attribute__((visibility("default"))) i64 emulated_requests(i32 lanes) {
    std::set<std::tuple<i32, i32, u64>> requests;
    for (const Asked& one : asked) requests.insert({one.block, one.thread / lanes, one.line});
    asked.clear();
    is_counting = false;
    return i64(requests.size());
}

// ---- what kernels call

void __syncthreads(Line line) {
    Hush hush;
    meet(Mode::at_barrier, first_of_block(), blockDim.x, line);
}

i32 __syncthreads_count(bool vote, Line line) {
    Hush hush;
    const u32 turn = ++self().count_turn;
    auto& table = block.counted[turn % 2];
    table[block.current] = {vote, turn};
    const i32 first = first_of_block();
    meet(Mode::at_barrier, first, blockDim.x, line);
    i32 count = 0;
    for (i32 i = first; i < first + blockDim.x; i++)
        count += table[i].turn == turn && table[i].value != 0;
    return count;
}

void cluster_barrier(Line line) {
    Hush hush;
    meet(Mode::at_cluster, 0, i32(block.fibers.size()), line);
}

void __syncwarp(u32 mask, Line line) {
    Hush hush;
    exchange(0, mask, line, Mode::at_warp);
}

// The lanes whose value passes.
template <typename Passes>
u32 lanes_that(u64 value, u32 mask, Line line, Passes passes) {
    Hush hush;
    const Given* given = exchange(value, mask, line);
    u32 lanes = 0;
    for (i32 lane = 0; lane < kLanes; lane++)
        lanes |= u32(gave(given[lane]) && passes(given[lane].value)) << lane;
    return lanes;
}

u32 __ballot_sync(u32 mask, bool vote, Line line) {
    return lanes_that(vote, mask, line, [](u64 given) { return given != 0; });
}

u32 __match_any_sync(u32 mask, i32 value, Line line) {
    return lanes_that(u32(value), mask, line, [=](u64 given) { return given == u32(value); });
}

i32 value_of(u32 mask, i32 value, i32 lane, Line line) {
    const Given& given = exchange(u32(value), mask, line)[lane];
    if (!gave(given)) fail("a value is asked of a lane that has left");
    return i32(given.value);
}

i32 __shfl_up_sync(u32 mask, i32 value, u32 by, Line line) {
    Hush hush;
    const i32 lane = threadIdx.x % kLanes;
    return value_of(mask, value, lane < i32(by) ? lane : lane - i32(by), line);
}

i32 __shfl_sync(u32 mask, i32 value, i32 lane, Line line) {
    Hush hush;
    return value_of(mask, value, lane % kLanes, line);
}

u32 __reduce_add_sync(u32 mask, u32 value, Line line) {
    Hush hush;
    const Given* given = exchange(value, mask, line);
    u32 sum = 0;
    for (i32 lane = 0; lane < kLanes; lane++)
        sum += gave(given[lane]) ? u32(given[lane].value) : 0;
    return sum;
}

i32 load_relaxed(const i32* from) {
    Hush hush;
    perhaps_leave();
    watch_touch(watched::kAtomicRead, from, sizeof(i32));
    return *from;
}

void store_relaxed(i32* to, i32 value) {
    Hush hush;
    perhaps_leave();
    watch_touch(watched::kAtomicWrite, to, sizeof(i32));
    *to = value;
}

void arrivals_ready() {
    Hush hush;
    self().new_arrivals.clear();
}

void check_bulk(const void* to, const void* from, u32 bytes) {
    if (size_t(to) % 16 || size_t(from) % 16 || bytes % 16)
        fail("a bulk copy is not in units of 16 bytes");
}

void bulk_load(void* to, const void* from, u32 bytes, u64* arrival) {
    Hush hush;
    check_bulk(to, from, bytes);
    if (size_t(arrival) % 8 || bytes >= 1u << 20)
        fail("an arrival lies at an odd address, or counts too much");
    for (u64* one : self().new_arrivals)
        if (one == arrival) fail("a barrier is used before the copy engine can see it");
    watch_touch(watched::kAtomicWrite, arrival, sizeof(u64));
    watch_touch(watched::kRead, from, bytes);
    watch_touch(watched::kWrite, to, bytes);
    std::memset(to, kPoison, bytes);
    block.loads.push_back({to, from, bytes, arrival});
}

void bulk_wait(u64* arrival, u32 parity) {
    Hush hush;
    auto& loads = block.loads;
    perhaps_leave();
    watch_touch(watched::kAtomicRead, arrival, sizeof(u64));
    for (size_t i = 0; i < loads.size() && (*arrival & 1) == parity; i++) {
        if (loads[i].arrival != arrival) continue;
        finish_load(loads[i]);
        loads.erase(loads.begin() + i--);
    }
    if ((*arrival & 1) == parity) fail("a thread waits for a row that no thread loads");
}

void bulk_store(void* to, const void* from, u32 bytes) {
    Hush hush;
    check_bulk(to, from, bytes);
    watch_touch(watched::kRead, from, bytes);
    watch_touch(watched::kWrite, to, bytes);
    self().stores.push_back({to, from, bytes});
}

void bulk_commit() {
    Hush hush;
    self().committed.push_back(self().stores);
    self().stores.clear();
}

void bulk_wait_written() {
    Hush hush;
    write_stores(0);
}
