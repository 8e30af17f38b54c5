// What the emulated device and the emulated driver tell the watch (watch.cpp): which memory there
// is, who runs, who has met whom. It sees every load and store of a kernel by itself.
#pragma once

#include <cstddef>

namespace watched {
enum Touch { kRead, kWrite, kAtomicRead, kAtomicWrite, kTouches };
enum Scope { kCluster, kBlock, kWarp };
}  // namespace watched

extern "C" {

// Memory that kernels may use; unwritten memory must be written before it is read.
void watch_array(const char* name, const void* at, size_t bytes, bool written);
void watch_forget(const void* at);
// From here on there is more memory than the watch is told of, and what is not known may be used.
void watch_others();
void watch_written(const void* at, size_t bytes);
void watch_copied(const void* to, const void* from, size_t bytes);

// A launch. `fail` gets a sentence and does not return.
void watch_launch(const char* kernel, int blocks, int cluster_blocks, int threads,
                  void (*fail)(const char*));
// Until the next launch: what no two threads share, or no thread writes.
void watch_private(const void* at, size_t bytes);
// The shared memory of a block that is about to run.
void watch_shared(const void* at, size_t bytes);
// Who runs from here on, and until when what runs is the device and no kernel.
void watch_thread(int block, int thread);
bool watch_hush(bool quiet);
// All threads around this one have met, or it has left for good.
void watch_met(watched::Scope scope, int block, int thread);
void watch_left();

// What no load or store of the kernel shows.
void watch_touch(watched::Touch touch, const void* at, size_t bytes);
// A load through the read-only path: no thread may write there in the whole launch.
void watch_constant(const void* at, size_t bytes);

}
