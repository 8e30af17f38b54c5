// All phases in one launch, by one block: a barrier costs less than a launch. What decides whether
// the phases after the probe run, and whether they scan, was written before a barrier.
#include "phases.cuh"

namespace {

__device__ void rank_tiles(const Resolve& call, i32 tiles, Desk& desk) {
    for (i32 tile = 0; tile < tiles; tile++) count_slots(call, tile, desk);
    __syncthreads();
    for (i32 warp = threadIdx.x / 32; warp <= kBins; warp += kWarps) scan(call, warp);
    __syncthreads();
    for (i32 tile = 0; tile < tiles; tile++) rank(call, tile, desk);
}

}  // namespace

ESS_PHASE(ess_resolve_together) {
    ESS_SHARED Desk desk;
    const i32 queries = call.query_count(), tiles = call.tile_count();
    for (i32 query = 0; query < queries; query++) probe(call, query, desk);
    __syncthreads();
    if (call.report->absent != 0) {
        for (i32 query = 0; query < queries; query++) count_rows(call, query, desk);
        __syncthreads();
        if (tiles > 1) {
            rank_tiles(call, tiles, desk);
        } else {
            if (threadIdx.x < 32) scan_rows(call);
            rank_alone(call, desk);
        }
        __syncthreads();
        for (i32 query = 0; query < queries; query++) assign(call, query, desk);
        __syncthreads();
    }
    for (i32 query = 0; query < queries; query++) serve(call, query, desk);
}
