// What the emulated driver has: streams with their work, events, graphs and memory.
#pragma once

#include "limits.h"
#include "races.h"
#include "watch.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

typedef int Result;
using limits::Address;
using limits::Function;
using limits::Span;
constexpr Result kOk = 0, kInvalid = 1, kNotInitialised = 3, kNoContext = 201, kNotFound = 500;
constexpr Result kNoHandle = 400;
constexpr Result kCapturing = 900, kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int64_t kMoments = 64;
constexpr Result kUnjoined = 904, kIsolation = 905, kCapturedEvent = 907;

namespace {

// `names` is the memory that it is given, by all the pointers in a kernel's record.
struct Work {
    std::function<bool()> ready;
    std::function<void()> run;
    std::vector<Span> names;
    std::string title = {};
};

struct Stream;
typedef std::set<size_t> Nodes;

// Work and what each piece of it must follow. `streams` are captured into it: the first began it,
// the others joined by waiting for an event of it. `gone` is work whose memory has been let go.
struct Graph {
    std::vector<Work> work;
    std::vector<Nodes> follows;
    std::vector<Stream*> streams;
    std::string gone;
};

// `captured` is the graph in which the event was recorded last; then it stands behind `nodes`.
struct Event {
    int64_t recorded = 0, passed = 0;
    int64_t tick = 0;
    Graph* captured = nullptr;
    Nodes nodes;
    std::map<int64_t, races::Clock> clocks;
};

struct Stream {
    int actor = races::new_actor();
    std::deque<Work> queue;
    Graph* capturing = nullptr;
    Nodes tail;
    bool destroyed = false;

    void take(Work one) {
        if (!capturing) return queue.push_back(one);
        capturing->work.push_back(one);
        capturing->follows.push_back(tail);
        tail = {capturing->work.size() - 1};
    }
};

uint64_t seed() {
    const char* given = std::getenv("ESS_DRIVER_SEED");
    return 88172645463325252ull + (given ? std::strtoull(given, nullptr, 10) : 0);
}

struct World {
    int host = races::new_actor();
    bool initialised = false;
    bool others = false;
    uint64_t random = seed();
    int64_t ticks = 0, allocation_count = 0;
    Stream legacy;
    std::vector<Stream*> streams{&legacy};
    std::map<Address, size_t> registered, allocated;
    std::set<void*> functions, events, graphs;
    std::string place;
};

World& world() {
    static World one;
    return one;
}

// Whether the calling thread has the context.
thread_local bool has_context = false;

uint64_t draw() {
    uint64_t& r = world().random;
    r ^= r << 13;
    r ^= r >> 7;
    return r ^= r << 17;
}

// A destroyed stream is gone when it has done what was queued on it.
void retire(Stream* stream) {
    if (!stream->destroyed || !stream->queue.empty()) return;
    auto& all = world().streams;
    all.erase(std::remove(all.begin(), all.end(), stream), all.end());
    races::end_actor(stream->actor);
}

bool advance() {
    std::vector<Stream*> ready;
    for (Stream* one : world().streams)
        if (!one->queue.empty() && one->queue.front().ready()) ready.push_back(one);
    if (ready.empty()) return false;
    Stream* stream = ready[draw() % ready.size()];
    Work work = stream->queue.front();
    stream->queue.pop_front();
    world().ticks++;
    work.run();
    retire(stream);
    return true;
}

Stream* stream_of(void* handle) { return handle ? (Stream*)handle : &world().legacy; }

bool is_stream(void* handle) {
    const auto& all = world().streams;
    Stream* one = stream_of(handle);
    return std::find(all.begin(), all.end(), one) != all.end() && !one->destroyed;
}

// What the real driver refuses while a stream is being captured.
bool capturing() {
    for (Stream* one : world().streams)
        if (one->capturing) return true;
    return false;
}

// `name` is that of the work, for the races that it is in. It comes behind all that the host knows
// to be over when it queues.
Result queue(void* stream, const std::string& name, std::function<void()> run,
             std::vector<Span> names = {}) {
    if (!has_context) return kNoContext;
    if (!is_stream(stream)) return kNoHandle;
    const int actor = stream_of(stream)->actor;
    if (!races::on) return stream_of(stream)->take({[] { return true; }, run, names, name}), kOk;
    const races::Clock known = races::now(world().host);
    stream_of(stream)->take({[] { return true; }, [=, text = world().place + name] {
        races::follow(actor, known);
        races::begin(actor, text);
        run();
    }, names, name});
    return kOk;
}

bool names(const Work& work, Address at, size_t bytes) {
    for (Span span : work.names)
        if (span.meets(at, bytes)) return true;
    return false;
}

// Memory that is let go may be another owner's at once. A graph that names it may stay, unlaunched.
void require_unnamed(Address at, size_t bytes) {
    for (Stream* one : world().streams)
        for (const Work& work : one->queue)
            if (names(work, at, bytes))
                limits::die("memory is let go that queued work names: " + work.title);
    for (void* graph : world().graphs)
        for (const Work& work : ((Graph*)graph)->work)
            if (names(work, at, bytes)) ((Graph*)graph)->gone = work.title;
}

Nodes before(const Graph& graph, const Nodes& nodes) {
    Nodes all = nodes;
    std::vector<size_t> open(nodes.begin(), nodes.end());
    while (!open.empty()) {
        const size_t node = open.back();
        open.pop_back();
        for (size_t earlier : graph.follows[node])
            if (all.insert(earlier).second) open.push_back(earlier);
    }
    return all;
}

// A stream that is captured may wait only for its own capture; one that is not joins the event's.
Result wait_in_capture(Stream* waits, const Event& event) {
    Graph* graph = event.captured;
    if (!graph || !graph->streams[0]->capturing) return kIsolation;
    if (waits->capturing && waits->capturing != graph) return kIsolation;
    if (!waits->capturing) {
        waits->capturing = graph;
        waits->tail.clear();
        graph->streams.push_back(waits);
    }
    waits->tail.insert(event.nodes.begin(), event.nodes.end());
    return kOk;
}

bool inside(const std::map<Address, size_t>& ranges, Address at, size_t bytes) {
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return false;
    --next;
    return at + bytes <= next->first + next->second;
}

bool reachable(Address at, size_t bytes) {
    if (world().others) return true;
    return inside(world().allocated, at, bytes) || inside(world().registered, at, bytes);
}

// What was never written is as unknown in the copy.
Result copy(Address to, Address from, size_t bytes, void* stream) {
    if (!reachable(to, bytes) || !reachable(from, bytes)) return kInvalid;
    return queue(stream, "copy", [=] {
        races::touch((void*)from, bytes, false);
        races::touch((void*)to, bytes, true);
        std::memcpy((void*)to, (void*)from, bytes);
        watch_copied((void*)to, (void*)from, bytes);
    }, {{to, bytes}, {from, bytes}});
}

}  // namespace
