// Finds races, strays and reads of nothing in kernels that run on the emulated device.
//
// Kernels are compiled with the compiler's thread instrumentation, which calls a function before
// every load and store; those functions are here instead of the compiler's own runtime. What the
// emulated device itself does is hushed.
//
// Two touches of one word race unless something orders them, whatever the schedule of this run.
// Threads form a tree: lanes of a warp, warps of a block, blocks of a cluster, clusters of a
// launch. What orders the members of a group is that all of them meet, so a group has an interval,
// which changes with every meeting, and two touches by different members of a group are ordered
// exactly if the interval of the group differs; deeper levels do not matter then. So a word needs
// to remember, for each way of touching it, one interval and one member for each level (or that
// there were several), and not a list of threads: what that forgets was ordered with all that
// follows. Launches are ordered: the interval of the outermost group is the launch itself. Atomic
// touches do not race with one another, and order nothing. A meeting orders those who come: what a
// thread has done since the last one before it left is never ordered with the rest of its block.
//
// Not seen: what goes astray within one array, or from one array right into another.
#include "watch.h"

#include "races.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace watched;

namespace {

constexpr int kLanes = 32, kLevels = 4, kMany = -1, kConstant = -2, kOrdered = -1;
constexpr const char* kWords[kTouches] = {"reads", "writes", "atomically reads",
                                          "atomically writes"};
typedef uintptr_t Address;

struct Thread {
    int block = 0, index = 0;

    bool operator==(const Thread& other) const {
        return block == other.block && index == other.index;
    }
    std::string name() const {
        return "block " + std::to_string(block) + " thread " + std::to_string(index);
    }
};

struct Path {
    unsigned interval[kLevels];
    int member[kLevels];
};

// `other` is a thread of another member than `who` at the level where there are many.
struct Seen {
    Path path;
    Thread who, other;
};

struct Word {
    Seen by[kTouches];
};

constexpr size_t kChunkWords = 64, kKeptMax = 1 << 12;  // 50 MB at most

struct Chunk {
    Word words[kChunkWords];
};

// Chunks of arrays that are gone, for later arrays. A word takes 192 bytes: to fill most fresh
// words took the system longer than their touches took here. Kept chunks need not be zero. What
// they have seen was an earlier launch, or an earlier block with its shared memory: the outermost
// interval of all that follows is another.
static std::vector<Chunk*> kept;

struct KeepChunk {
    void operator()(Chunk* chunk) const {
        if (kept.size() < kKeptMax) kept.push_back(chunk);
        else std::free(chunk);
    }
};

typedef std::unique_ptr<Chunk, KeepChunk> KeptChunk;

// Only what is touched takes memory.
struct Words {
    std::vector<KeptChunk> chunks;

    Word* known(size_t at) const {
        Chunk* chunk = chunks[at / kChunkWords].get();
        return chunk ? &chunk->words[at % kChunkWords] : nullptr;
    }

    Word& get(size_t at) {
        KeptChunk& chunk = chunks[at / kChunkWords];
        if (!chunk && kept.empty()) chunk.reset((Chunk*)std::calloc(1, sizeof(Chunk)));
        if (!chunk) {
            chunk.reset(kept.back());
            kept.pop_back();
        }
        return chunk->words[at % kChunkWords];
    }

    // Without keeping what this launch has touched: it would order wrongly in another array.
    void free() {
        for (KeptChunk& chunk : chunks) std::free(chunk.release());
    }
};

// Words are 4 bytes until a thread touches less than that. The blocks of a cluster have their
// shared memory at the same address in turn: there are as many copies, and one is seen.
struct Array {
    std::string name;
    Address at = 0;
    size_t bytes = 0;
    size_t grain = 4;
    unsigned shared_by = 0;
    size_t copies = 1, copy = 0;
    std::vector<bool> written;
    Words words;

    Address end() const { return at + bytes; }

    size_t word(Address address) const {
        return copy * ((end() - 1) / grain - at / grain + 1) + address / grain - at / grain;
    }

    std::vector<bool>::reference is_written(Address address) {
        return written[copy * bytes + address - at];
    }

    void make_words(size_t of) {
        Array before = {{}, at, bytes, grain, 0, copies, 0, {}, std::move(words)};
        const size_t seen = copy;
        grain = of;
        copy = copies;
        words.chunks.resize((word(at) + kChunkWords - 1) / kChunkWords);
        const bool has_words = !before.words.chunks.empty();
        for (copy = 0; has_words && copy < copies; before.copy = ++copy)
            for (Address i = at; i < end(); i++)
                if (const Word* known = before.words.known(before.word(i)))
                    words.get(word(i)) = *known;
        before.words.free();
        copy = seen;
    }
};

struct Run {
    std::string kernel;
    int cluster_blocks = 1, threads = 1;
    unsigned launch = 0;
    std::vector<unsigned> cluster, block, warp;
    std::vector<Path> left;
    void (*fail)(const char*) = nullptr;
};

struct Span {
    Address at;
    size_t bytes;
};

struct Watch {
    bool quiet = true;
    bool moved = false;
    bool others = false;
    unsigned ticks = 0;
    std::map<Address, Array> arrays;
    Array* found = nullptr;
    std::vector<Span> own;
    Run run;
    Thread now;
    Path path;
};

static Watch watch;

[[noreturn]] void fail(const std::string& sentence) {
    watch.quiet = true;
    static char kept[512];
    std::snprintf(kept, sizeof kept, "%s: %s", watch.run.kernel.c_str(), sentence.c_str());
    watch.run.fail(kept);
    std::abort();
}

std::string place(const Array& array, Address at) {
    return array.name + " at byte " + std::to_string(at - array.at) + " of " +
           std::to_string(array.bytes);
}

int member(Thread thread, int level) {
    const int blocks = watch.run.cluster_blocks;
    const int members[kLevels] = {thread.block / blocks, thread.block % blocks,
                                  thread.index / kLanes, thread.index % kLanes};
    return members[level];
}

const Path& left_at(Thread thread) {
    const Run& run = watch.run;
    return run.left[size_t(thread.block) * run.threads + thread.index];
}

// The level at which nothing orders these two, if any.
int unordered(const Seen& seen, const Path& now) {
    for (int level = 0; level < kLevels; level++) {
        const unsigned then = seen.path.interval[level];
        if (then != now.interval[level])
            return level > 0 && left_at(seen.who).interval[level] == then ? level : kOrdered;
        if (seen.path.member[level] != now.member[level]) return level;
    }
    return kOrdered;
}

void add(Seen& seen, const Path& now, Thread who) {
    int level = 0;
    while (level < kLevels && seen.path.interval[level] == now.interval[level]) {
        int& member = seen.path.member[level];
        if (member != now.member[level]) {
            if (member != kMany) seen.other = who;
            member = kMany;
            return;
        }
        level++;
    }
    if (level == kLevels) return;
    seen.who = seen.other = who;
    for (; level < kLevels; level++) {
        seen.path.interval[level] = now.interval[level];
        seen.path.member[level] = now.member[level];
    }
}

bool conflict(int one, int other) {
    const bool writes = one == kWrite || one == kAtomicWrite || other == kWrite ||
                        other == kAtomicWrite;
    return writes && (one < kAtomicRead || other < kAtomicRead);
}

[[noreturn]] void tell_race(const Array& array, Address at, int touch, int earlier,
                            const Seen& seen, int level, bool constant) {
    const bool same = member(seen.who, level) == member(watch.now, level);
    std::string sentence = "race on " + place(array, at) + ": " + watch.now.name() + " " +
                           kWords[touch] + " what " + (same ? seen.other : seen.who).name() + " " +
                           kWords[earlier];
    if (constant || seen.path.member[0] == kConstant) sentence += ", one of them as a constant";
    fail(sentence + "; nothing orders them");
}

void check_race(Array& array, Address at, int touch, const Path& now) {
    Word& word = array.words.get(array.word(at));
    for (int earlier = 0; earlier < kTouches; earlier++) {
        if (!conflict(touch, earlier)) continue;
        const int level = unordered(word.by[earlier], now);
        if (level != kOrdered)
            tell_race(array, at, touch, earlier, word.by[earlier], level,
                      now.member[0] == kConstant);
    }
    add(word.by[touch], now, watch.now);
}

// Mostly the one that was found before: arrays do not overlap.
Array* find(Address at) {
    if (watch.found && at - watch.found->at < watch.found->bytes) return watch.found;
    auto& arrays = watch.arrays;
    auto next = arrays.upper_bound(at);
    if (next == arrays.begin()) return nullptr;
    Array& array = (--next)->second;
    return at < array.end() ? watch.found = &array : nullptr;
}

bool is_own(Address at, size_t bytes) {
    for (const Span& span : watch.own)
        if (at - span.at < span.bytes && at + bytes <= span.at + span.bytes) return true;
    return false;
}

[[noreturn]] void tell_stray(int touch, Address at, size_t bytes) {
    std::string sentence = watch.now.name() + " " + kWords[touch] + " " + std::to_string(bytes) +
                           " bytes outside of every array";
    auto next = watch.arrays.upper_bound(at);
    if (next != watch.arrays.begin()) {
        const Array& before = std::prev(next)->second;
        sentence += ", " + std::to_string(int64_t(at + bytes - before.end())) +
                    " bytes past the end of " + before.name + " (" +
                    std::to_string(before.bytes) + " bytes)";
    }
    if (next != watch.arrays.end())
        sentence += ", " + std::to_string(next->first - at) + " before " + next->second.name;
    fail(sentence);
}

void check_written(Array& array, Address at, size_t bytes, int touch) {
    if (array.written.empty()) return;
    const bool writes = touch == kWrite || touch == kAtomicWrite;
    for (Address i = at; i < at + bytes; i++) {
        if (!writes && !array.is_written(i))
            fail(watch.now.name() + " " + kWords[touch] + " " + place(array, i) +
                 ", which no thread has written");
        if (writes) array.is_written(i) = true;
    }
}

void follow() {
    const Run& run = watch.run;
    watch.moved = false;
    const size_t warps = (run.threads + kLanes - 1) / kLanes, block = watch.now.block;
    watch.path.interval[0] = run.launch;
    watch.path.interval[1] = run.cluster[block / run.cluster_blocks];
    watch.path.interval[2] = run.block[block];
    watch.path.interval[3] = run.warp[block * warps + watch.now.index / kLanes];
    for (int level = 0; level < kLevels; level++)
        watch.path.member[level] = member(watch.now, level);
}

void check(int touch, Address at, size_t bytes, bool constant) {
    if (is_own(at, bytes)) return;
    Array* array = find(at);
    if (!array || !array->shared_by)
        races::touch((void*)at, bytes, touch == kWrite || touch == kAtomicWrite);
    if (array ? at + bytes > array->end() : !watch.others) tell_stray(touch, at, bytes);
    if (bytes <= 16 && at % bytes != 0)
        fail(watch.now.name() + " " + kWords[touch] + " a unit of " + std::to_string(bytes) +
             " bytes at the odd address of " + (array ? place(*array, at) : "memory of others"));
    if (!array) return;
    if (watch.moved) follow();
    if (array->shared_by) array->copy = watch.path.member[1];
    check_written(*array, at, bytes, touch);
    if (array->words.chunks.empty()) array->make_words(bytes % 4 ? 1 : 4);
    if (bytes % 4 && array->grain != 1) array->make_words(1);
    Path now = watch.path;
    if (array->shared_by) now.interval[0] = array->shared_by;
    if (constant) now.member[0] = kConstant;
    for (Address word = at; word < at + bytes; word += array->grain)
        check_race(*array, word, touch, now);
}

void add_array(const char* name, const void* at, size_t bytes, bool written, unsigned shared_by) {
    watch.found = nullptr;
    Array& array = watch.arrays[Address(at)];
    const size_t copies = shared_by ? watch.run.cluster_blocks : 1;
    if (array.bytes != bytes || array.copies != copies) array.words.chunks.clear();
    array.copies = copies;
    array.name = name;
    array.at = Address(at);
    array.bytes = bytes;
    array.shared_by = shared_by;
    array.written.assign(written ? 0 : copies * bytes, false);
}

}  // namespace

void watch_array(const char* name, const void* at, size_t bytes, bool written) {
    if (bytes > 0) add_array(name, at, bytes, written, 0);
}

void watch_others() { watch.others = true; }

void watch_forget(const void* at) {
    watch.found = nullptr;
    watch.arrays.erase(Address(at));
}

void watch_written(const void* at, size_t bytes) {
    Array* array = find(Address(at));
    if (!array || array->written.empty()) return;
    const auto from = array->written.begin() + (Address(at) - array->at);
    std::fill(from, from + bytes, true);
}

void watch_copied(const void* to, const void* from, size_t bytes) {
    const Array *source = find(Address(from)), *target = find(Address(to));
    if (!source || source->written.empty()) return watch_written(to, bytes);
    for (size_t i = 0; target && i < bytes; i++)
        if (source->written[Address(from) - source->at + i])
            watch_written((const char*)to + i, 1);
}

void watch_launch(const char* kernel, int blocks, int cluster_blocks, int threads,
                  void (*fail)(const char*)) {
    const size_t warps = size_t(threads + kLanes - 1) / kLanes;
    watch.quiet = true;
    watch.own.clear();
    watch.found = nullptr;
    for (auto next = watch.arrays.begin(); next != watch.arrays.end();)
        next = next->second.shared_by ? watch.arrays.erase(next) : std::next(next);
    watch.run = {kernel, cluster_blocks, threads, ++watch.ticks, {}, {}, {}, {}, fail};
    watch.run.cluster.assign((blocks + cluster_blocks - 1) / cluster_blocks, ++watch.ticks);
    watch.run.block.assign(blocks, ++watch.ticks);
    watch.run.warp.assign(blocks * warps, ++watch.ticks);
    watch.run.left.assign(size_t(blocks) * threads, Path());
}

void watch_private(const void* at, size_t bytes) { watch.own.push_back({Address(at), bytes}); }

void watch_shared(const void* at, size_t bytes) {
    if (bytes > 0) add_array("shared memory", at, bytes, false, ++watch.ticks);
}

void watch_thread(int block, int thread) {
    watch.now = {block, thread};
    watch.moved = true;
}

bool watch_hush(bool quiet) {
    const bool before = watch.quiet;
    watch.quiet = quiet;
    return before;
}

void watch_met(Scope scope, int block, int thread) {
    Run& run = watch.run;
    const size_t warps = size_t(run.threads + kLanes - 1) / kLanes;
    const unsigned tick = ++watch.ticks;
    if (scope == kCluster) run.cluster[block / run.cluster_blocks] = tick;
    if (scope == kBlock) run.block[block] = tick;
    if (scope == kWarp) run.warp[block * warps + thread / kLanes] = tick;
    watch.moved = true;
}

void watch_left() {
    if (watch.moved) follow();
    watch.run.left[size_t(watch.now.block) * watch.run.threads + watch.now.index] = watch.path;
}

void watch_touch(Touch touch, const void* at, size_t bytes) {
    check(touch, Address(at), bytes, false);
}

void watch_constant(const void* at, size_t bytes) { check(kRead, Address(at), bytes, true); }

// ---- what instrumented code calls

#define ESS_SEEN(name, touch, bytes)                               \
    extern "C" void __tsan_##name(const void* at) {                \
        if (!watch.quiet) check(touch, Address(at), bytes, false); \
    }

ESS_SEEN(read1, kRead, 1)
ESS_SEEN(write1, kWrite, 1)
ESS_SEEN(read2, kRead, 2)
ESS_SEEN(write2, kWrite, 2)
ESS_SEEN(read4, kRead, 4)
ESS_SEEN(write4, kWrite, 4)
ESS_SEEN(read8, kRead, 8)
ESS_SEEN(write8, kWrite, 8)
ESS_SEEN(read16, kRead, 16)
ESS_SEEN(write16, kWrite, 16)
ESS_SEEN(unaligned_read2, kRead, 2)
ESS_SEEN(unaligned_write2, kWrite, 2)
ESS_SEEN(unaligned_read4, kRead, 4)
ESS_SEEN(unaligned_write4, kWrite, 4)
ESS_SEEN(unaligned_read8, kRead, 8)
ESS_SEEN(unaligned_write8, kWrite, 8)
ESS_SEEN(unaligned_read16, kRead, 16)
ESS_SEEN(unaligned_write16, kWrite, 16)

extern "C" void __tsan_init() {}
extern "C" void __tsan_read_range(const void* at, size_t bytes) {
    if (!watch.quiet) check(kRead, Address(at), bytes, false);
}
extern "C" void __tsan_write_range(const void* at, size_t bytes) {
    if (!watch.quiet) check(kWrite, Address(at), bytes, false);
}
