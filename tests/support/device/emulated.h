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
// The device is emulated.cpp, compiled once; here is what each kernel is compiled with.
#pragma once

#include "calls.h"

#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define ESS_KERNEL extern "C" void
#define ESS_CLUSTER(blocks)
#define ESS_SHARED static __attribute__((section("ess_shared")))
#define ESS_DYNAMIC_SHARED(name) u8* name = emulated::dynamic_shared()

namespace emulated {

#ifdef ESS_BLOCKS
constexpr i32 kClusterBlocks = ESS_BLOCKS;
#else
constexpr i32 kClusterBlocks = 1;
#endif

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) const i32 cluster_blocks =
    emulated::kClusterBlocks;

// A launch from Python: the record, the grid, the threads of a block, its shared bytes, a seed. It
// returns what went wrong, or null. The size of the record is for the caller that must copy it.
#define ESS_EMULATE(kernel, Record)                                                              \
    static_assert(sizeof(Record) <= 4096, "arguments of a kernel");                              \
    extern "C" __attribute__((visibility("default"))) const i32 bytes_##kernel = sizeof(Record); \
    extern "C" __attribute__((visibility("default"))) const char* emulate_##kernel(              \
        const Record* record, i32 blocks, i32 threads, i32 shared_bytes, u64 seed) {             \
        return emulated::launch(                                                                 \
            #kernel, [](const void* at) { kernel(*(const Record*)at); }, record, sizeof(Record), \
            {blocks, emulated::kClusterBlocks, threads, shared_bytes}, seed);                    \
    }
