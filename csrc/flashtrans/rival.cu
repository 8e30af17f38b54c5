// The loop that others use, for the benchmark alone: a warp takes a row, a unit of 8 or 16 bytes a
// lane, and the next step of a row starts when the one before has been stored.
#include "move.cuh"

ESS_KERNEL __launch_bounds__(1024, 1) ess_rival_rows(const __grid_constant__ Move move) {
    const i32 warps = gridDim.x * blockDim.x / 32, lane = threadIdx.x % 32;
    const i32 count = move.pair_count();
    for (i32 pair = (blockIdx.x * blockDim.x + threadIdx.x) / 32; pair < count; pair += warps) {
        const i32 source = move.source_row(pair), target = move.target_row(pair);
        if (source < 0 || target < 0) continue;
        const Unit* from = (const Unit*)move.source_at(source);
        Unit* to = (Unit*)move.target_at(target);
#pragma unroll 1
        for (i32 unit = lane; unit < ESS_ROW_BYTES / ESS_UNIT_BYTES; unit += 32)
            store_unit(to + unit, load_unit(from + unit));
    }
}
