// Kernels with one mistake each, and beside every mistake the right way: what the watch must find.
#include "../../../csrc/flashtrans/device.cuh"

namespace {

struct Trial {
    i32* words;
    u8* bytes;
};

constexpr u32 kAll = ~0u;

}  // namespace

#define ESS_TRIAL(name) ESS_KERNEL name(const __grid_constant__ Trial call)
#define ESS_SELF [[maybe_unused]] const i32 self = threadIdx.x, block = blockIdx.x

// ---- two blocks of 64 threads: what orders whom

ESS_TRIAL(neighbour) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = 0;
    __syncthreads();
    kept[self] = block;
    call.words[block * 64 + self] = kept[(self + 63) % 64];
}

ESS_TRIAL(neighbour_after_barrier) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = block;
    __syncthreads();
    call.words[block * 64 + self] = kept[(self + 63) % 64];
}

ESS_TRIAL(neighbour_after_count) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = block;
    const i32 count = __syncthreads_count(self % 2 == 0);
    call.words[block * 64 + self] = kept[(self + 63) % 64] + count;
}

ESS_TRIAL(lane_after_sum) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = 0;
    __syncthreads();
    kept[self] = i32(__reduce_add_sync(kAll, u32(self)));
    __reduce_add_sync(kAll, 1);
    call.words[block * 64 + self] = kept[self ^ 1];
}

ESS_TRIAL(overwritten_too_early) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    for (i32 turn = 0; turn < 2; turn++) {
        kept[self] = turn;
        __syncthreads();
        call.words[block * 64 + self] = kept[(self + 1) % 64];
    }
}

ESS_TRIAL(lane) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = 0;
    __syncthreads();
    kept[self] = self;
    call.words[block * 64 + self] = kept[self ^ 1];
}

ESS_TRIAL(lane_after_warp) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = self;
    __syncwarp();
    call.words[block * 64 + self] = kept[self ^ 1];
}

ESS_TRIAL(lane_after_vote) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = 0;
    __syncthreads();
    kept[self] = self;
    __ballot_sync(kAll, true);
    call.words[block * 64 + self] = kept[self ^ 1];
}

ESS_TRIAL(warp_after_warp) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    kept[self] = 0;
    __syncthreads();
    kept[self] = self;
    __syncwarp();
    call.words[block * 64 + self] = kept[self ^ 32];
}

ESS_TRIAL(many_readers) {
    ESS_SHARED i32 kept;
    ESS_SELF;
    if (self == 0) kept = 1;
    __syncthreads();
    call.words[block * 64 + self] = kept;
    __syncwarp();
    if (self == 32) kept = 2;
}

ESS_TRIAL(block_to_block) {
    ESS_SELF;
    if (self == 0) call.words[0] = 7;
    __syncthreads();
    if (self == 1) call.words[1 + block] = call.words[0];
}

ESS_TRIAL(block_to_block_atomically) {
    ESS_SELF;
    if (self == 0) atomicExch(call.words, 7);
    if (self == 1) call.words[1 + block] = load_relaxed(call.words);
}

ESS_TRIAL(atomic_and_plain) {
    ESS_SELF;
    atomicAdd(call.words, 1);
    if (self == 0) call.words[1 + block] = call.words[0];
}

ESS_TRIAL(bytes_beside) {
    ESS_SELF;
    call.bytes[block * 64 + self] = u8(self);
}

ESS_TRIAL(words_then_bytes) {
    ESS_SELF;
    if (block == 1 || self >= 32) return;
    reinterpret_cast<i32*>(call.bytes)[self] = self;
    call.bytes[self * 4] = u8(self);
    call.words[self ^ 1] = self;
}

ESS_TRIAL(bytes_twice) {
    ESS_SELF;
    call.bytes[(block * 64 + self) / 2] = u8(self);
}

ESS_TRIAL(constant_is_written) {
    ESS_SELF;
    const u32 unit = load_unit((const u32*)call.words + block * 64 + self);
    call.words[block * 64 + self] = i32(unit) + 1;
}

// Right within a cluster, wrong between two; the blocks of one have their own shared memory.
ESS_TRIAL(through_the_cluster) {
    ESS_SHARED i32 kept;
    ESS_SELF;
    if (self == 0) kept = block;
    if (self == 1 && block == 0) call.words[0] = 7;
    cluster_barrier();
    if (self == 2) call.words[1 + block] = call.words[0] + kept;
}

// ---- strays, odd addresses, nothing there

ESS_TRIAL(one_past_the_end) {
    ESS_SELF;
    call.words[block * 64 + self + 1] = 0;
}

ESS_TRIAL(one_before_the_start) {
    ESS_SELF;
    call.bytes[block * 64 + self] = u8(call.words[block * 64 + self - 1]);
}

ESS_TRIAL(past_shared) {
    ESS_DYNAMIC_SHARED(kept);
    ESS_SELF;
    ((i32*)kept)[self + 1] = 0;
}

ESS_TRIAL(nowhere) {
    if (threadIdx.x == 5) call.words[i64(1) << 40] = 1;
}

ESS_TRIAL(odd_unit) {
    if (threadIdx.x == 0) store_unit((uint2*)(call.words + 1 + 4 * blockIdx.x), uint2{1, 2});
}

ESS_TRIAL(shared_before_it_is_written) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    if (self < 63) kept[self] = 0;
    __syncthreads();
    call.words[block * 64 + self] = kept[63 - self];
}

ESS_TRIAL(read_words) {
    ESS_SELF;
    call.bytes[block * 64 + self] = u8(call.words[block * 64 + self]);
}

ESS_TRIAL(write_words) {
    ESS_SELF;
    call.words[block * 64 + self] = 3;
}

// ---- who meets whom

ESS_TRIAL(half_at_another_barrier) {
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
}

ESS_TRIAL(half_a_warp_at_the_barrier) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    __syncwarp();
}

ESS_TRIAL(the_rest_meets) {
    ESS_SHARED i32 kept[64];
    ESS_SELF;
    if (self % 2 == 0) return;
    kept[self] = self;
    __syncwarp();
    const u32 lanes = __ballot_sync(kAll, true);
    __syncthreads();
    call.words[block * 64 + self] = kept[self ^ 32] + (lanes == 0xAAAAAAAAu ? 1000 : 0);
}

ESS_TRIAL(left_before_the_barrier) {
    ESS_SHARED i32 kept;
    ESS_SELF;
    if (self == 0) {
        kept = 1;
        return;
    }
    __syncthreads();
    call.words[block * 64 + self] = kept;
}

ESS_TRIAL(value_of_one_who_left) {
    ESS_SELF;
    if (self == 0) return;
    call.words[block * 64 + self] = __shfl_sync(kAll, self, 0);
}

ESS_TRIAL(part_of_a_warp) {
    if (threadIdx.x % 32 < 16) __ballot_sync(0xFFFF, true);
}
