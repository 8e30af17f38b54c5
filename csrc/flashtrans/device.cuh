// What the kernels need of a device: plain types, row units with their ways of loading and storing,
// and the bulk copies of sm_90. No header is included, so NVRTC compiles these sources as they are.
// The tests compile the same sources for a CPU (ESS_EMULATED) with their own version of this file.
#pragma once

#ifdef ESS_EMULATED
#include "emulated.h"
#else

typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

#define ESS_KERNEL extern "C" __global__ void
#define ESS_SHARED __shared__
#define ESS_DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

// Rows are read through the read-only path: nothing may write them while the kernel runs. They are
// written to L2, where attention soon looks.
#define ESS_LOAD_OP "ld.global.nc.L1::no_allocate"
#define ESS_STORE_OP "st.global.cg"

__device__ __forceinline__ uint4 load_unit(const uint4* from) {
    uint4 unit;
    asm volatile(ESS_LOAD_OP ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(from));
    return unit;
}

__device__ __forceinline__ uint2 load_unit(const uint2* from) {
    uint2 unit;
    asm volatile(ESS_LOAD_OP ".v2.u32 {%0, %1}, [%2];" : "=r"(unit.x), "=r"(unit.y) : "l"(from));
    return unit;
}

__device__ __forceinline__ u32 load_unit(const u32* from) {
    u32 unit;
    asm volatile(ESS_LOAD_OP ".u32 %0, [%1];" : "=r"(unit) : "l"(from));
    return unit;
}

__device__ __forceinline__ void store_unit(uint4* to, uint4 unit) {
    asm volatile(ESS_STORE_OP ".v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
                 : "memory");
}

__device__ __forceinline__ void store_unit(uint2* to, uint2 unit) {
    asm volatile(ESS_STORE_OP ".v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(unit.x), "r"(unit.y)
                 : "memory");
}

__device__ __forceinline__ void store_unit(u32* to, u32 unit) {
    asm volatile(ESS_STORE_OP ".u32 [%0], %1;" :: "l"(to), "r"(unit) : "memory");
}

// A word that threads without order between them may read and write: the value is one that
// a thread wrote, whole, and nothing follows from it about other words.
__device__ __forceinline__ i32 load_relaxed(const i32* from) {
    i32 word;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void store_relaxed(i32* to, i32 word) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
}

// Waits until the host has written the word, or the time is over.
__device__ __forceinline__ void wait_for_host(const i32* word, i64 limit_ns) {
    i64 begun, now;
    i32 seen;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun) :: "memory");
    do {
        asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    } while (seen == 0 && now - begun < limit_ns);
}

// ---- clusters (sm_90): blocks that run at once and wait for one another

#define ESS_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)

// What any thread of the cluster wrote before it, all see after it.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- bulk copies: the copy engine of a multiprocessor moves whole rows through shared memory

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void arrival_init(u64* arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(arrival)));
}

// Barriers made by ordinary stores become visible to the copy engine.
__device__ __forceinline__ void arrivals_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* arrival) {
    u32 at = shared_address(arrival);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(at)
        : "memory");
}

__device__ __forceinline__ void bulk_wait(u64* arrival, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}"
        :: "r"(shared_address(arrival)), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the last `left` committed stores have read their shared memory.
template <int left>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(left) : "memory");
}

__device__ __forceinline__ void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
