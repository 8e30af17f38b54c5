// All phases in one launch, by the blocks of one cluster: its barrier costs less than a launch, and
// what its blocks wrote before it, all of them see behind it.
//
// A block takes every n-th part and tile. Of the first of each it keeps what it has seen from one
// phase to the next, which saves the loads; of small calls it has no other.
#include "phases.cuh"

constexpr i32 kBlocks = ESS_BLOCKS;

ESS_PHASE(ESS_CLUSTER(kBlocks) ess_resolve_together) {
    ESS_SHARED Desk desk;
    const i32 own = blockIdx.x, parts = call.part_count(), queries = call.query_count();
    const i32 tiles = call.tile_count();
    for (i32 part = own; part < parts; part += kBlocks) probe(call, part, desk);
    cluster_barrier();
    if (call.report->absent != 0) {
        Look seen = {};
        Named named = {};
        for (i32 tile = own; tile < tiles; tile += kBlocks) {
            const Look other = look(call, tile);
            if (tile == own) seen = other;
            count_slots(call, tile, other, desk);
        }
        for (i32 part = own; part < parts; part += kBlocks) {
            const Named other = name_first(call, Entry::of(call, part));
            if (part == own) named = other;
            count_rows(call, part, other);
        }
        cluster_barrier();
        const i32 missing = call.report->missing;
        for (i32 tile = own; tile < tiles; tile += kBlocks) {
            if (tile != own) seen = look(call, tile);
            rank(call, tile, Totals::of(call, tile), missing, seen, desk);
        }
        cluster_barrier();
        for (i32 part = own; part < parts; part += kBlocks) {
            const Entry at = Entry::of(call, part);
            if (part != own) named = name_first(call, at);
            assign(call, part, at, named, desk);
        }
        cluster_barrier();
    }
    for (i32 query = own; query < queries; query += kBlocks) serve(call, query, desk);
}
