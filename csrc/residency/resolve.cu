// One kernel a phase, for batches that fill the device. 
#include "phases.cuh"

ESS_PHASE(ess_probe) {
    ESS_SHARED Desk desk;
    if (i32(blockIdx.x) < call.query_count()) probe(call, blockIdx.x, desk);
}

ESS_PHASE(ess_count) {
    ESS_SHARED Desk desk;
    if (call.report->absent == 0) return;
    const i32 tile = i32(blockIdx.x) - i32(call.query_max);
    if (tile >= 0) {
        if (tile < call.tile_count()) count_slots(call, tile, desk);
    } else if (i32(blockIdx.x) < call.query_count()) {
        count_rows(call, blockIdx.x, desk);
    }
}

ESS_PHASE(ess_scan) {
    if (call.report->absent != 0) scan(call, blockIdx.x * kWarps + threadIdx.x / 32);
}

ESS_PHASE(ess_rank) {
    ESS_SHARED Desk desk;
    if (call.report->absent == 0) return;
    if (i32(blockIdx.x) < call.tile_count()) rank(call, blockIdx.x, desk);
}

ESS_PHASE(ess_assign) {
    ESS_SHARED Desk desk;
    if (call.report->absent != 0 && i32(blockIdx.x) < call.query_count())
        assign(call, blockIdx.x, desk);
}

ESS_PHASE(ess_serve) {
    ESS_SHARED Desk desk;
    if (i32(blockIdx.x) < call.query_count()) serve(call, blockIdx.x, desk);
}
