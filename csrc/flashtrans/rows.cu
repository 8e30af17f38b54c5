// Gather and scatter of many small rows, by the threads of a few blocks.
//
// A row of 656 bytes is 41 units of 16 bytes. The rows of a call are one flat sequence of units and
// every lane takes every n-th one: no lane idles, as 23 of 32 do when a warp takes a row in two
// steps. A thread has kInFlight units on the wire at once: all are loaded before the first is
// stored, and between the two the row numbers of its next units are fetched, which then cost no
// time of their own. 1,024 threads with four units hold 64 KiB in flight, more than the link has
// room for in a round trip, so that two to four blocks are enough.
//
// Row and column of a thread's units advance by a fixed step and carry: a division by the number of
// units in 64 bits, which a flat index of two thousand million rows would need, costs as much as
// the rest of the loop.
//
// The host sees the rows of a scatter once the event behind the kernel has passed; no fence here.
#include "move.cuh"

namespace {

#if ESS_UNIT_BYTES == 16
typedef uint4 Unit;
#elif ESS_UNIT_BYTES == 8
typedef uint2 Unit;
#else
typedef u32 Unit;
#endif

constexpr i32 kRowUnits = ESS_ROW_BYTES / ESS_UNIT_BYTES;
constexpr i32 kInFlight = ESS_IN_FLIGHT;
static_assert(ESS_ROW_BYTES % ESS_UNIT_BYTES == 0, "a row is whole units");
static_assert(ESS_UNIT_BYTES == sizeof(Unit), "units are 4, 8 or 16 bytes");

struct Place {
    i32 pair;
    i32 column;

    __device__ static Place of(i32 units) { return {units / kRowUnits, units % kRowUnits}; }

    __device__ void advance(Place by) {
        pair += by.pair;
        column += by.column;
        if (column >= kRowUnits) {
            column -= kRowUnits;
            pair++;
        }
    }
};

// The rows of a thread's next units; -1 where there is nothing to do.
struct Ahead {
    i32 source[kInFlight];
    i32 target[kInFlight];
    i32 column[kInFlight];

    __device__ __forceinline__ void look(const Move& move, i32 count, Place at, Place step) {
#pragma unroll
        for (i32 j = 0; j < kInFlight; j++, at.advance(step)) {
            bool inside = at.pair < count;
            source[j] = inside ? move.source_row(at.pair) : -1;
            target[j] = inside ? move.target_row(at.pair) : -1;
            column[j] = at.column;
        }
    }
};

}  // namespace

ESS_KERNEL __launch_bounds__(1024, 1) ess_move_rows(const __grid_constant__ Move move) {
    const i32 count = move.pair_count();
    const i32 threads = gridDim.x * blockDim.x;
    const Place step = Place::of(threads), leap = Place::of(threads * kInFlight);
    Place at = Place::of(blockIdx.x * blockDim.x + threadIdx.x);
    Ahead ahead;
    ahead.look(move, count, at, step);
    while (at.pair < count) {
        Unit held[kInFlight];
        Unit* to[kInFlight];
#pragma unroll
        for (i32 j = 0; j < kInFlight; j++) {
            to[j] = nullptr;
            if (ahead.source[j] >= 0 && ahead.target[j] >= 0) {
                held[j] = load_unit((const Unit*)move.source_at(ahead.source[j]) + ahead.column[j]);
                to[j] = (Unit*)move.target_at(ahead.target[j]) + ahead.column[j];
            }
        }
        at.advance(leap);
        ahead.look(move, count, at, step);
#pragma unroll
        for (i32 j = 0; j < kInFlight; j++)
            if (to[j] != nullptr) store_unit(to[j], held[j]);
    }
}
