// All phases in one launch, by one block or by the blocks of one cluster: a barrier costs less than
// a launch. Every block takes each n-th query, tile and warp of the scan.
//
// The barrier of a cluster orders all that its blocks have written, global memory included, as the
// end of a kernel does. It is passed by all threads or by none: what decides whether the phases
// after the probe run was written before a barrier.
#include "phases.cuh"

#if ESS_BLOCKS == 1
#define ESS_TOGETHER
__device__ __forceinline__ void all_blocks() { __syncthreads(); }
#else
#define ESS_TOGETHER ESS_CLUSTER(ESS_BLOCKS)
__device__ __forceinline__ void all_blocks() { cluster_barrier(); }
#endif

ESS_KERNEL ESS_TOGETHER __launch_bounds__(kThreads)
ess_resolve_together(const __grid_constant__ Resolve call) {
    ESS_SHARED Desk desk;
    const i32 queries = call.query_count(), tiles = call.tile_count(), own = blockIdx.x;
    for (i32 i = threadIdx.x; own == 0 && i < i32(sizeof(Report) / sizeof(i32)); i += kThreads)
        ((i32*)call.report)[i] = 0;
    all_blocks();
    for (i32 query = own; query < queries; query += ESS_BLOCKS) probe(call, query, desk);
    all_blocks();
    if (call.report->absent != 0) {
        for (i32 query = own; query < queries; query += ESS_BLOCKS) count_rows(call, query, desk);
        for (i32 tile = own; tile < tiles; tile += ESS_BLOCKS) count_slots(call, tile, desk);
        all_blocks();
        for (i32 warp = own * kWarps + threadIdx.x / 32; warp <= kBins; warp += ESS_BLOCKS * kWarps)
            scan(call, warp);
        all_blocks();
        for (i32 tile = own; tile < tiles; tile += ESS_BLOCKS) rank(call, tile, desk);
        all_blocks();
        for (i32 query = own; query < queries; query += ESS_BLOCKS) assign(call, query, desk);
        all_blocks();
    }
    for (i32 query = own; query < queries; query += ESS_BLOCKS) serve(call, query, desk);
}
