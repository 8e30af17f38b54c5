// A libcuda.so.1 for the tests: cuda-python calls it as it would call the real one, kernels run on
// the emulated device, and streams do as little as they are allowed to.
//
// Work is queued and nothing happens until the host asks an event; then a few operations run, each
// the next one of a stream drawn at random among those whose waits are over. So whatever is not
// ordered by an event goes wrong sooner or later. A module is the path of an emulated library.
// Host memory must be registered before a kernel or a copy names it; memory of the device that is
// freed is poisoned. The watch is told what there is, so that it finds kernels that stray.
#include "watch.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int Result;
typedef unsigned long long Address;
constexpr Result kOk = 0, kInvalid = 1, kNotInitialised = 3, kNoContext = 201, kNotFound = 500;
constexpr Result kCapturing = 900, kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713;

namespace {

struct Event {
    int64_t recorded = 0, passed = 0;
    int64_t tick = 0;
};

struct Work {
    std::function<bool()> ready;
    std::function<void()> run;
};

struct Graph {
    std::vector<Work> work;
};

struct Stream {
    std::deque<Work> queue;
    Graph* capturing = nullptr;

    void take(Work one) {
        if (capturing) capturing->work.push_back(one);
        else queue.push_back(one);
    }
};

struct Function {
    const char* (*launch)(const void*, int, int, int, uint64_t);
    int record_bytes;
};

uint64_t seed() {
    const char* given = std::getenv("ESS_DRIVER_SEED");
    return 88172645463325252ull + (given ? std::strtoull(given, nullptr, 10) : 0);
}

struct World {
    bool initialised = false;
    bool current = false;
    uint64_t random = seed();
    int64_t ticks = 0, allocation_count = 0;
    Stream legacy;
    std::vector<Stream*> streams{&legacy};
    std::map<Address, size_t> registered, allocated;
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

Result queue(void* stream, std::function<void()> run) {
    if (!world().current) return kNoContext;
    stream_of(stream)->take({[] { return true; }, run});
    return kOk;
}

bool inside(const std::map<Address, size_t>& ranges, Address at, size_t bytes) {
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return false;
    --next;
    return at + bytes <= next->first + next->second;
}

bool reachable(Address at, size_t bytes) {
    return inside(world().allocated, at, bytes) || inside(world().registered, at, bytes);
}

// What was never written is as unknown in the copy.
Result copy(Address to, Address from, size_t bytes, void* stream) {
    if (!reachable(to, bytes) || !reachable(from, bytes)) return kInvalid;
    return queue(stream, [=] {
        std::memcpy((void*)to, (void*)from, bytes);
        watch_copied((void*)to, (void*)from, bytes);
    });
}

}  // namespace

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
    *function = new Function{(decltype(Function::launch))launch, *(int*)bytes};
    return kOk;
}
EXPORT Result cuFuncSetAttribute(void*, int, int) { return kOk; }
EXPORT Result cuLaunchKernel(void* handle, unsigned blocks, unsigned, unsigned, unsigned threads,
                             unsigned, unsigned, unsigned shared, void* stream, void** parameters,
                             void**) {
    Function function = *(Function*)handle;
    std::vector<char> record((char*)parameters[0], (char*)parameters[0] + function.record_bytes);
    return queue(stream, [=] {
        alignas(16) char own[1024];
        std::memcpy(own, record.data(), record.size());
        const char* wrong = function.launch(own, int(blocks), int(threads), int(shared), draw());
        if (!wrong) return;
        std::fprintf(stderr, "emulated device: %s\n", wrong);
        std::abort();
    });
}
EXPORT Result cuLaunchHostFunc(void* stream, void (*run)(void*), void* argument) {
    return queue(stream, [=] { run(argument); });
}

EXPORT Result cuStreamCreateWithPriority(void** stream, unsigned, int) {
    world().streams.push_back(new Stream);
    return *stream = world().streams.back(), kOk;
}
EXPORT Result cuStreamDestroy(void* stream) {
    while (!((Stream*)stream)->queue.empty() && advance()) {
    }
    auto& all = world().streams;
    for (size_t i = 0; i < all.size(); i++)
        if (all[i] == stream) all.erase(all.begin() + i--);
    return kOk;
}
EXPORT Result cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    Event* event = (Event*)handle;
    int64_t wanted = event->recorded;
    stream_of(stream)->queue.push_back({[=] { return event->passed >= wanted; }, [] {}});
    return kOk;
}

EXPORT Result cuStreamBeginCapture_v2(void* stream, int) {
    return stream_of(stream)->capturing = new Graph, kOk;
}
EXPORT Result cuStreamEndCapture(void* stream, void** graph) {
    *graph = stream_of(stream)->capturing;
    stream_of(stream)->capturing = nullptr;
    return *graph ? kOk : kInvalid;
}
EXPORT Result cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t) {
    return *executable = new Graph(*(Graph*)graph), kOk;
}
EXPORT Result cuGraphDestroy(void* graph) { return delete (Graph*)graph, kOk; }
EXPORT Result cuGraphExecDestroy(void*) { return kOk; }
EXPORT Result cuGraphLaunch(void* executable, void* stream) {
    for (const Work& one : ((Graph*)executable)->work) stream_of(stream)->queue.push_back(one);
    return kOk;
}

EXPORT Result cuEventCreate(void** event, unsigned) { return *event = new Event, kOk; }
EXPORT Result cuEventDestroy(void*) { return kOk; }
EXPORT Result cuEventRecord(void* handle, void* stream) {
    Event* event = (Event*)handle;
    int64_t number = ++event->recorded;
    return queue(stream, [=] {
        event->passed = number;
        event->tick = world().ticks;
    });
}
EXPORT Result cuEventQuery(void* handle) {
    Event* event = (Event*)handle;
    for (uint64_t left = draw() % 4; left > 0 && event->passed < event->recorded; left--) {
        if (!advance()) {
            std::fprintf(stderr, "emulated driver: streams wait for one another\n");
            std::abort();
        }
    }
    return event->passed < event->recorded ? kNotReady : kOk;
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
    const std::string name = "device memory " + std::to_string(++world().allocation_count);
    watch_array(name.c_str(), (void*)*at, bytes, false);
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
EXPORT Result cuMemsetD32Async(Address at, unsigned value, size_t count, void* stream) {
    if (!reachable(at, count * 4) || at % 4) return kInvalid;
    return queue(stream, [=] {
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
