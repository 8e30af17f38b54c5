// One kernel a phase, for batches that fill the device.
#include "phases.cuh"

ESS_PHASE(ess_probe) {
    ESS_SHARED Desk desk;
    probe(call, blockIdx.x, desk);
}

// Tiles first: they take longer.
ESS_PHASE(ess_count) {
    ESS_SHARED Desk desk;
    const i32 tile = blockIdx.x, part = tile - i32(call.tile_max);
    const i32 tiles = call.tile_count(), parts = call.part_count();
    if (call.report->absent == 0) return;
    if (tile < tiles) count_slots(call, tile, look(call, tile), desk);
    if (part >= 0 && part < parts) count_rows(call, part, name_first(call, Entry::of(call, part)));
}

// Two blocks share a multiprocessor. If that is not said, the assembler keeps to 40 registers under
// score, and spills.
ESS_KERNEL __launch_bounds__(kThreads, 2) ess_rank(const __grid_constant__ Resolve call) {
    ESS_SHARED Desk desk;
    rank_tile(call, blockIdx.x, desk);
}

ESS_PHASE(ess_assign) {
    ESS_SHARED Desk desk;
    const i32 part = blockIdx.x, parts = call.part_count();
    if (call.report->absent == 0 || part >= parts) return;
    const Entry at = Entry::of(call, part);
    assign(call, part, at, name_first(call, at), desk);
}

ESS_PHASE(ess_serve) {
    ESS_SHARED Desk desk;
    if (i32(blockIdx.x) < call.query_count()) serve(call, blockIdx.x, desk);
}
