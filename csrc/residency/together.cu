// All phases in one launch, by the blocks of one cluster: its barrier costs less than a launch, and
// what its blocks wrote before it, all of them see behind it.
#include "phases.cuh"

constexpr i32 kBlocks = ESS_BLOCKS;

ESS_PHASE(ESS_CLUSTER(kBlocks) ess_resolve_together) {
    ESS_SHARED Desk desk;
    const i32 parts = call.part_count(), tiles = call.tile_count(), queries = call.query_count();
    for (i32 part = blockIdx.x; part < parts; part += kBlocks) probe(call, part, desk);
    cluster_barrier();
    if (call.report->absent != 0) {
        for (i32 tile = blockIdx.x; tile < tiles; tile += kBlocks) count_slots(call, tile, desk);
        for (i32 part = blockIdx.x; part < parts; part += kBlocks) count_rows(call, part);
        cluster_barrier();
        for (i32 tile = blockIdx.x; tile < tiles; tile += kBlocks) rank(call, tile, desk);
        cluster_barrier();
        for (i32 part = blockIdx.x; part < parts; part += kBlocks) assign(call, part, desk);
        cluster_barrier();
    }
    for (i32 query = blockIdx.x; query < queries; query += kBlocks) serve(call, query, desk);
}
