// A libcuda.so.1 for the tests: cuda-python calls it as it would call the real one, kernels run on
// the emulated device, and streams do as little as they are allowed to.
//
// Work is queued and nothing happens until the host asks an event; then a few operations run, each
// the next one of a stream drawn at random among those whose waits are over. So whatever is not
// ordered by an event goes wrong sooner or later. A module is the path of an emulated library.
// What is captured runs in any order that its events allow, and may name no memory that is gone.
// The legacy stream is not captured. Each thread must make the context current.
// Host memory must be registered before a kernel or a copy names it; memory of the device that is
// freed is poisoned, and none may be let go while queued work names it. Handles that are
// destroyed are refused. A stream that is destroyed does what is queued on it, but later. The watch
// is told what there is, so that it finds kernels that stray.
#include "world.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Memory that this driver has not given out is torch's: the device's too, for all it can tell.
EXPORT void reach_others() { world().others = true; }

EXPORT Result cuInit(unsigned) {
    world().initialised = true;
    return std::getenv("ESS_NO_DEVICE") ? 100 : kOk;
}

// Several devices differ in nothing but their number.
static int device_count() {
    const char* asked = std::getenv("EMULATED_DEVICES");
    return asked ? std::atoi(asked) : 1;
}
EXPORT Result cuDeviceGetCount(int* count) { return *count = device_count(), kOk; }
// That of CUDA 13.0, or the one asked for.
EXPORT Result cuDriverGetVersion(int* version) {
    const char* asked = std::getenv("EMULATED_VERSION");
    return *version = asked ? std::atoi(asked) : 13000, kOk;
}
static int asked_last = 0;
EXPORT Result cuDeviceGet(int* device, int ordinal) {
    *device = asked_last = ordinal;
    if (!world().initialised) return kNotInitialised;
    return 0 <= ordinal && ordinal < device_count() ? kOk : 101;
}
EXPORT Result cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, bytes, "emulated");
    return kOk;
}
EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int) {
    static const std::map<int, int> values = {
        {16, 132}, {75, 9}, {97, 227 << 10}, {120, 1}};
    *value = values.count(attribute) ? values.at(attribute) : 0;
    return kOk;
}
EXPORT Result cuDevicePrimaryCtxRetain(void** context, int) { return *context = &world(), kOk; }
EXPORT Result cuCtxSetCurrent(void* context) {
    has_context = context == &world();
    return has_context ? kOk : kInvalid;
}

EXPORT Result cuModuleLoadData(void** module, const void* image) {
    if (!has_context) return kNoContext;
    if (capturing()) return kCapturing;
    *module = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) std::fprintf(stderr, "%s\n", dlerror());
    return *module ? kOk : 200;
}
EXPORT Result cuModuleGetFunction(void** function, void* module, const char* name) {
    std::string entry = name;
    void* launch = dlsym(module, ("emulate_" + entry).c_str());
    const int* bytes = (const int*)dlsym(module, ("bytes_" + entry).c_str());
    const int* cluster = (const int*)dlsym(module, "cluster_blocks");
    if (!launch || !bytes || !cluster) return kNotFound;
    *function = new Function{entry, (decltype(Function::launch))launch, *bytes, *cluster};
    world().functions.insert(*function);
    return kOk;
}
EXPORT Result cuFuncSetAttribute(void* handle, int attribute, int value) {
    if (!world().functions.count(handle)) return kNoHandle;
    return limits::allow(*(Function*)handle, attribute, value) ? kOk : kInvalid;
}
// What ctypes says that the record of the next launch has.
EXPORT void driver_record(int bytes) { limits::told_record_bytes = bytes; }
EXPORT Result cuLaunchKernel(void* handle, unsigned blocks, unsigned, unsigned, unsigned threads,
                             unsigned, unsigned, unsigned shared, void* stream, void** parameters,
                             void**) {
    if (!world().functions.count(handle)) return kNoHandle;
    Function function = *(Function*)handle;
    limits::check_record(function);
    if (limits::refuses(function, {blocks, threads, shared})) return kInvalid;
    std::vector<char> record((char*)parameters[0], (char*)parameters[0] + function.record_bytes);
    return queue(stream, function.name, [=] {
        alignas(16) char own[limits::kRecordBytes];
        std::memcpy(own, record.data(), record.size());
        const char* wrong = function.launch(own, int(blocks), int(threads), int(shared), draw());
        if (!wrong) return;
        std::fprintf(stderr, "emulated device: %s\n", wrong);
        std::abort();
    }, limits::pointers(record));
}
EXPORT Result cuLaunchHostFunc(void* stream, void (*run)(void*), void* argument) {
    return queue(stream, "host function", [=] { run(argument); });
}
// A later form of the same name takes one argument more.
EXPORT Result cuLaunchHostFunc_v2(void*, void (*)(void*), void*, unsigned) {
    limits::die("a host function is queued by a form of the call that is newer than asked for");
}

EXPORT void driver_finish(void* stream);
EXPORT void driver_drain();
EXPORT void races_waited(void* stream);
EXPORT Result cuStreamCreateWithPriority(void** stream, unsigned, int) {
    if (!has_context) return kNoContext;
    world().streams.push_back(new Stream);
    return *stream = world().streams.back(), kOk;
}
EXPORT Result cuStreamDestroy(void* stream) {
    if (!stream || !is_stream(stream)) return kNoHandle;
    ((Stream*)stream)->destroyed = true;
    return retire((Stream*)stream), kOk;
}
EXPORT Result cuStreamSynchronize(void* stream) {
    if (capturing()) return kCapturing;
    if (!is_stream(stream)) return kNoHandle;
    return driver_finish(stream), races_waited(stream), kOk;
}
EXPORT Result cuCtxSynchronize() {
    if (!has_context) return kNoContext;
    if (capturing()) return kCapturing;
    return driver_drain(), kOk;
}
EXPORT Result cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    if (!world().events.count(handle) || !is_stream(stream)) return kNoHandle;
    Event* event = (Event*)handle;
    Stream* waits = stream_of(stream);
    if (event->captured || waits->capturing) return wait_in_capture(waits, *event);
    int64_t wanted = event->recorded;
    waits->queue.push_back({[=] { return event->passed >= wanted; }, [=] {
        races::follow(waits->actor, event->clocks[wanted]);
    }, {}});
    return kOk;
}

EXPORT Result cuStreamBeginCapture_v2(void* stream, int) {
    Stream* first = stream_of(stream);
    if (!stream) return kCapturing;
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
    world().graphs.insert(*executable = new Graph(*(Graph*)graph));
    return kOk;
}
// Events remember the graph in which they were recorded, so it stays.
EXPORT Result cuGraphDestroy(void*) { return kOk; }
EXPORT Result cuGraphExecDestroy(void* executable) {
    return world().graphs.erase(executable) ? kOk : kNoHandle;
}
EXPORT Result cuGraphLaunch(void* executable, void* stream) {
    if (!world().graphs.count(executable) || !is_stream(stream)) return kNoHandle;
    const Graph& graph = *(Graph*)executable;
    if (!graph.gone.empty()) limits::die("a graph names memory that is gone: " + graph.gone);
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

EXPORT Result cuEventCreate(void** event, unsigned) {
    if (!has_context) return kNoContext;
    world().events.insert(*event = new Event);
    return kOk;
}
// Who waits for it goes on waiting.
EXPORT Result cuEventDestroy(void* event) { return world().events.erase(event) ? kOk : kNoHandle; }
EXPORT Result cuEventRecord(void* handle, void* stream) {
    if (!world().events.count(handle) || !is_stream(stream)) return kNoHandle;
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
    if (!world().events.count(handle)) return kNoHandle;
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
    for (void* each : {from, to}) {
        if (!world().events.count(each) || !((Event*)each)->recorded) return kNoHandle;
        if (((Event*)each)->passed < ((Event*)each)->recorded) return kNotReady;
    }
    *ms = float(((Event*)to)->tick - ((Event*)from)->tick);
    return kOk;
}

// As some drivers do, it refuses more than EMULATED_REGISTERED bytes at once.
EXPORT Result cuMemHostRegister(void* at, size_t bytes, unsigned) {
    auto& ranges = world().registered;
    if (capturing()) return kCapturing;
    if (!has_context) return kNoContext;
    const char* most = std::getenv("EMULATED_REGISTERED");
    if (most && bytes > std::strtoull(most, nullptr, 10)) return kInvalid;
    for (auto& [start, size] : ranges)
        if (Address(at) < start + size && start < Address(at) + bytes) return kAlreadyRegistered;
    ranges[Address(at)] = bytes;
    races::forget(at, bytes);
    watch_array("host memory", at, bytes, true);
    return kOk;
}
EXPORT Result cuMemHostUnregister(void* at) {
    const auto found = world().registered.find(Address(at));
    if (found == world().registered.end()) return kNotRegistered;
    require_unnamed(found->first, found->second);
    watch_forget(at);
    world().registered.erase(found);
    return kOk;
}
EXPORT Result cuMemHostGetDevicePointer(Address* seen, void* at, unsigned) {
    if (!inside(world().registered, Address(at), 1)) return kInvalid;
    return *seen = Address(at) + (std::getenv("ESS_SPLIT_ADDRESSES") ? 4096 : 0), kOk;
}
EXPORT Result cuMemAlloc(Address* at, size_t bytes) {
    if (capturing()) return kCapturing;
    if (!has_context) return kNoContext;
    *at = Address(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset((void*)*at, 0xFF, bytes);
    world().allocated[*at] = bytes;
    races::forget((void*)*at, bytes);
    const std::string name = "device memory " + std::to_string(++world().allocation_count);
    watch_array(name.c_str(), (void*)*at, bytes, false);
    return kOk;
}
// Of 80 GiB what neither this process has, as far as the driver gave it out, nor others:
// EMULATED_USED=0,1000 says how many bytes they have of the first device, the second and so on.
EXPORT Result cuMemGetInfo(size_t* free, size_t* total) {
    if (!has_context) return kNoContext;
    *free = *total = 80ull << 30;
    const char* used = std::getenv("EMULATED_USED");
    for (int i = 0; used && i < asked_last; i++)
        if ((used = std::strchr(used, ','))) used++;
    *free -= used ? std::strtoull(used, nullptr, 10) : 0;
    for (auto& [start, size] : world().allocated) *free -= size;
    return kOk;
}
EXPORT Result cuMemFree(Address at) {
    auto found = world().allocated.find(at);
    if (found == world().allocated.end()) return kInvalid;
    require_unnamed(at, found->second);
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
    }, {{at, count * 4}});
}

// The first form of each call, if the version asked for has it; names are those without a number.
EXPORT Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t,
                                  int* status) {
    static const std::map<std::string, int> since = {{"cuMemcpyBatchAsync_v2", 13000}};
    if (status) *status = 0;
    if (std::string(name).find("_v") != std::string::npos) return kNotFound;
    for (const std::string& form : {std::string(name), name + std::string("_v2"),
                                    name + std::string("WithFlags")})
        if (!since.count(form) || since.at(form) <= version)
            if ((*function = dlsym(RTLD_DEFAULT, form.c_str()))) return kOk;
    return kNotFound;
}

// ---- for who does work itself, at once and in the order of a stream, as torch does here

// Whether the stream belongs to a capture. What is work then has its place there.
EXPORT bool driver_captures(void* stream, bool is_work) {
    Stream* one = stream_of(stream);
    if (one->capturing && is_work) one->take({[] { return true; }, [] {}, {}});
    return one->capturing;
}
EXPORT void driver_let_go(Address at, size_t bytes) { require_unnamed(at, bytes); }
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
    for (Stream* one : std::vector<Stream*>(world().streams)) {
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
