// A libcuda.so.1 for the tests: cuda-python calls it as it would call the real one, kernels run on
// the emulated device, and streams do as little as they are allowed to.
//
// Work is queued and nothing happens until the host asks an event; then a few operations run, each
// the next one of a stream drawn at random among those whose waits are over. So whatever is not
// ordered by an event goes wrong sooner or later. A module is the path of an emulated library.
// What is captured runs in any order that its events allow.
// Host memory must be registered before a kernel or a copy names it; memory of the device that is
// freed is poisoned. The watch is told what there is, so that it finds kernels that stray.
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

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int Result;
typedef unsigned long long Address;
constexpr Result kOk = 0, kInvalid = 1, kNotInitialised = 3, kNoContext = 201, kNotFound = 500;
constexpr Result kCapturing = 900, kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int64_t kMoments = 64;
constexpr Result kUnjoined = 904, kIsolation = 905, kCapturedEvent = 907;

namespace {

struct Work {
    std::function<bool()> ready;
    std::function<void()> run;
};

struct Stream;
typedef std::set<size_t> Nodes;

// Work and what each piece of it must follow. `streams` are captured into it: the first began it,
// the others joined by waiting for an event of it.
struct Graph {
    std::vector<Work> work;
    std::vector<Nodes> follows;
    std::vector<Stream*> streams;
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

    void take(Work one) {
        if (!capturing) return queue.push_back(one);
        capturing->work.push_back(one);
        capturing->follows.push_back(tail);
        tail = {capturing->work.size() - 1};
    }
};

struct Function {
    std::string name;
    const char* (*launch)(const void*, int, int, int, uint64_t);
    int record_bytes;
};

uint64_t seed() {
    const char* given = std::getenv("ESS_DRIVER_SEED");
    return 88172645463325252ull + (given ? std::strtoull(given, nullptr, 10) : 0);
}

struct World {
    int host = races::new_actor();
    bool initialised = false;
    bool current = false;
    bool others = false;
    uint64_t random = seed();
    int64_t ticks = 0, allocation_count = 0;
    Stream legacy;
    std::vector<Stream*> streams{&legacy};
    std::map<Address, size_t> registered, allocated;
    std::string place;
};

World& world() {
    static World one;
    return one;
}

uint64_t draw() {
    uint64_t& r = world().random;
    r ^= r << 13;
    r ^= r >> 7;
    return r ^= r << 17;
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
    return true;
}

Stream* stream_of(void* handle) { return handle ? (Stream*)handle : &world().legacy; }

// What the real driver refuses while a stream is being captured.
bool capturing() {
    for (Stream* one : world().streams)
        if (one->capturing) return true;
    return false;
}

// `name` is that of the work, for the races that it is in. It comes behind all that the host knows
// to be over when it queues.
Result queue(void* stream, const std::string& name, std::function<void()> run) {
    if (!world().current) return kNoContext;
    const int actor = stream_of(stream)->actor;
    if (!races::on) return stream_of(stream)->take({[] { return true; }, run}), kOk;
    const races::Clock known = races::now(world().host);
    stream_of(stream)->take({[] { return true; }, [=, text = world().place + name] {
        races::follow(actor, known);
        races::begin(actor, text);
        run();
    }});
    return kOk;
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
    });
}

}  // namespace

// Memory that this driver has not given out is torch's: the device's too, for all it can tell.
EXPORT void reach_others() { world().others = true; }

EXPORT Result cuInit(unsigned) {
    world().initialised = true;
    return std::getenv("ESS_NO_DEVICE") ? 100 : kOk;
}

EXPORT Result cuDeviceGetCount(int* count) { return *count = 1, kOk; }
EXPORT Result cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return !world().initialised ? kNotInitialised : ordinal == 0 ? kOk : 101;
}
EXPORT Result cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, bytes, "emulated");
    return kOk;
}
EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 0;
    return kOk;
}
EXPORT Result cuDevicePrimaryCtxRetain(void** context, int) { return *context = &world(), kOk; }
EXPORT Result cuCtxSetCurrent(void* context) {
    world().current = context == &world();
    return world().current ? kOk : kInvalid;
}

EXPORT Result cuModuleLoadData(void** module, const void* image) {
    if (capturing()) return kCapturing;
    *module = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) std::fprintf(stderr, "%s\n", dlerror());
    return *module ? kOk : 200;
}
EXPORT Result cuModuleGetFunction(void** function, void* module, const char* name) {
    std::string entry = name;
    void* launch = dlsym(module, ("emulate_" + entry).c_str());
    void* bytes = dlsym(module, ("bytes_" + entry).c_str());
    if (!launch || !bytes) return kNotFound;
    *function = new Function{entry, (decltype(Function::launch))launch, *(int*)bytes};
    return kOk;
}
EXPORT Result cuFuncSetAttribute(void*, int, int) { return kOk; }
EXPORT Result cuLaunchKernel(void* handle, unsigned blocks, unsigned, unsigned, unsigned threads,
                             unsigned, unsigned, unsigned shared, void* stream, void** parameters,
                             void**) {
    Function function = *(Function*)handle;
    std::vector<char> record((char*)parameters[0], (char*)parameters[0] + function.record_bytes);
    return queue(stream, function.name, [=] {
        alignas(16) char own[1024];
        std::memcpy(own, record.data(), record.size());
        const char* wrong = function.launch(own, int(blocks), int(threads), int(shared), draw());
        if (!wrong) return;
        std::fprintf(stderr, "emulated device: %s\n", wrong);
        std::abort();
    });
}
EXPORT Result cuLaunchHostFunc(void* stream, void (*run)(void*), void* argument) {
    return queue(stream, "host function", [=] { run(argument); });
}

EXPORT void driver_finish(void* stream);
EXPORT Result cuStreamCreateWithPriority(void** stream, unsigned, int) {
    world().streams.push_back(new Stream);
    return *stream = world().streams.back(), kOk;
}
EXPORT Result cuStreamDestroy(void* stream) {
    driver_finish(stream);
    auto& all = world().streams;
    for (size_t i = 0; i < all.size(); i++)
        if (all[i] == stream) all.erase(all.begin() + i--);
    races::end_actor(((Stream*)stream)->actor);
    return kOk;
}
EXPORT Result cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    Event* event = (Event*)handle;
    Stream* waits = stream_of(stream);
    if (event->captured || waits->capturing) return wait_in_capture(waits, *event);
    int64_t wanted = event->recorded;
    waits->queue.push_back({[=] { return event->passed >= wanted; }, [=] {
        races::follow(waits->actor, event->clocks[wanted]);
    }});
    return kOk;
}

EXPORT Result cuStreamBeginCapture_v2(void* stream, int) {
    Stream* first = stream_of(stream);
    if (first->capturing) return kInvalid;
    first->capturing = new Graph;
    first->capturing->streams.push_back(first);
    first->tail.clear();
    return kOk;
}
EXPORT Result cuStreamEndCapture(void* stream, void** result) {
    Graph* graph = stream_of(stream)->capturing;
    *result = graph;
    if (!graph || graph->streams[0] != stream_of(stream)) return kInvalid;
    const Nodes joined = before(*graph, stream_of(stream)->tail);
    Result answer = kOk;
    for (Stream* one : graph->streams) {
        for (size_t node : one->tail) answer = joined.count(node) ? answer : kUnjoined;
        one->capturing = nullptr;
    }
    return answer;
}
EXPORT Result cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t) {
    return *executable = new Graph(*(Graph*)graph), kOk;
}
// Events remember the graph in which they were recorded, so it stays.
EXPORT Result cuGraphDestroy(void*) { return kOk; }
EXPORT Result cuGraphExecDestroy(void*) { return kOk; }
EXPORT Result cuGraphLaunch(void* executable, void* stream) {
    const Graph& graph = *(Graph*)executable;
    Nodes left, done;
    for (size_t node = 0; node < graph.work.size(); node++) left.insert(node);
    while (!left.empty()) {
        std::vector<size_t> ready;
        for (size_t node : left)
            if (std::includes(done.begin(), done.end(), graph.follows[node].begin(),
                              graph.follows[node].end()))
                ready.push_back(node);
        const size_t next = ready[draw() % ready.size()];
        stream_of(stream)->take(graph.work[next]);
        left.erase(next);
        done.insert(next);
    }
    return kOk;
}

EXPORT Result cuEventCreate(void** event, unsigned) { return *event = new Event, kOk; }
EXPORT Result cuEventDestroy(void*) { return kOk; }
EXPORT Result cuEventRecord(void* handle, void* stream) {
    Event* event = (Event*)handle;
    Stream* records = stream_of(stream);
    event->captured = records->capturing;
    event->nodes = records->tail;
    if (records->capturing) return kOk;
    int64_t number = ++event->recorded;
    return queue(stream, "event", [=] {
        event->passed = number;
        event->tick = world().ticks;
        event->clocks[number] = races::now(records->actor);
        event->clocks.erase(event->clocks.begin(), event->clocks.lower_bound(number - kMoments));
    });
}
EXPORT Result cuEventQuery(void* handle) {
    Event* event = (Event*)handle;
    if (event->captured) return kCapturedEvent;
    if (capturing()) return kCapturing;
    for (uint64_t left = draw() % 4; left > 0 && event->passed < event->recorded; left--) {
        if (!advance()) {
            std::fprintf(stderr, "emulated driver: streams wait for one another\n");
            std::abort();
        }
    }
    if (event->passed < event->recorded) return kNotReady;
    races::follow(world().host, event->clocks[event->recorded]);
    return kOk;
}
EXPORT Result cuEventElapsedTime(float* ms, void* from, void* to) {
    *ms = float(((Event*)to)->tick - ((Event*)from)->tick);
    return kOk;
}

EXPORT Result cuMemHostRegister(void* at, size_t bytes, unsigned) {
    auto& ranges = world().registered;
    if (capturing()) return kCapturing;
    if (!world().current) return kNoContext;
    for (auto& [start, size] : ranges)
        if (Address(at) < start + size && start < Address(at) + bytes) return kAlreadyRegistered;
    ranges[Address(at)] = bytes;
    races::forget(at, bytes);
    watch_array("host memory", at, bytes, true);
    return kOk;
}
EXPORT Result cuMemHostUnregister(void* at) {
    watch_forget(at);
    return world().registered.erase(Address(at)) ? kOk : kNotRegistered;
}
EXPORT Result cuMemHostGetDevicePointer(Address* seen, void* at, unsigned) {
    if (!inside(world().registered, Address(at), 1)) return kInvalid;
    return *seen = Address(at) + (std::getenv("ESS_SPLIT_ADDRESSES") ? 4096 : 0), kOk;
}
EXPORT Result cuMemAlloc(Address* at, size_t bytes) {
    if (capturing()) return kCapturing;
    if (!world().current) return kNoContext;
    *at = Address(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset((void*)*at, 0xFF, bytes);
    world().allocated[*at] = bytes;
    races::forget((void*)*at, bytes);
    const std::string name = "device memory " + std::to_string(++world().allocation_count);
    watch_array(name.c_str(), (void*)*at, bytes, false);
    return kOk;
}
// 80 GiB, or ESS_DEVICE_BYTES of them, less what the driver itself has given out.
EXPORT Result cuMemGetInfo(size_t* free, size_t* total) {
    if (!world().current) return kNoContext;
    const char* given = std::getenv("ESS_DEVICE_BYTES");
    *free = *total = given ? std::strtoull(given, nullptr, 10) : 80ull << 30;
    for (auto& [start, size] : world().allocated) *free -= size;
    return kOk;
}
EXPORT Result cuMemFree(Address at) {
    auto found = world().allocated.find(at);
    if (found == world().allocated.end()) return kInvalid;
    std::memset((void*)at, 0xFF, found->second);
    watch_forget((void*)at);
    world().allocated.erase(found);
    return kOk;
}
EXPORT Result cuMemcpyHtoDAsync(Address to, const void* from, size_t bytes, void* stream) {
    if (!inside(world().registered, Address(from), bytes)) return kInvalid;
    return copy(to, Address(from), bytes, stream);
}
EXPORT Result cuMemcpyDtoHAsync(void* to, Address from, size_t bytes, void* stream) {
    return copy(Address(to), from, bytes, stream);
}
EXPORT Result cuMemcpyDtoDAsync(Address to, Address from, size_t bytes, void* stream) {
    return copy(to, from, bytes, stream);
}
// In any order; the copies of a batch depend on nothing in it.
EXPORT Result cuMemcpyBatchAsync_v2(const Address* to, const Address* from, const size_t* bytes,
                                    size_t count, const void*, const size_t*, size_t,
                                    void* stream) {
    for (size_t i = count; i-- > 0;)
        if (Result wrong = copy(to[i], from[i], bytes[i], stream)) return wrong;
    return kOk;
}
EXPORT Result cuMemsetD32Async(Address at, unsigned value, size_t count, void* stream) {
    if (!reachable(at, count * 4) || at % 4) return kInvalid;
    return queue(stream, "memset", [=] {
        races::touch((void*)at, count * 4, true);
        for (size_t i = 0; i < count; i++) ((unsigned*)at)[i] = value;
        watch_written((void*)at, count * 4);
    });
}

EXPORT Result cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, void*) {
    for (const std::string& form : {std::string(name), name + std::string("_v2"),
                                    name + std::string("WithFlags")})
        if ((*function = dlsym(RTLD_DEFAULT, form.c_str()))) return kOk;
    return kNotFound;
}

// ---- for who does work itself, at once and in the order of a stream, as torch does here

EXPORT void races_place(const char* place) { world().place = place; }
EXPORT void races_name(void* stream, const char* name) {
    races::name_actor(stream_of(stream)->actor, name);
}
EXPORT void races_work(void* stream, bool is_host, const char* name) {
    const int actor = is_host ? world().host : stream_of(stream)->actor;
    races::follow(actor, races::now(world().host));
    races::begin(actor, name);
}
// The host waits for everything.
EXPORT void driver_drain() {
    for (Stream* one : world().streams) {
        driver_finish(one);
        races::follow(world().host, races::now(one->actor));
    }
}
// The host has waited for all of the stream.
EXPORT void races_waited(void* stream) {
    races::follow(world().host, races::now(stream_of(stream)->actor));
}
// All that is queued on the stream has run.
EXPORT void driver_finish(void* stream) {
    while (!stream_of(stream)->queue.empty()) {
        if (advance()) continue;
        std::fprintf(stderr, "emulated driver: streams wait for one another\n");
        std::abort();
    }
}
