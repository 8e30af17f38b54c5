// Gather and scatter of many small rows, by the threads of a few blocks.
//
// Over a link to the host a multiprocessor asks for lines of 128 bytes, and only so many requests
// are on their way at a time. So no line may be asked for twice. A row is taken as the lines that
// it touches: its span begins at the line in which the row begins, wherever that is within the
// line, and has as many lines as a row at the worst place touches. A row of 656 bytes at a multiple
// of 16 lies in a span of six lines, 48 units of 16 bytes, of which seven lie outside and are left
// out. The spans of a call are one flat sequence of units, and every lane takes every n-th one: a
// warp has whole lines, and a line is one warp's. Where both sides cannot be met at once, the lines
// are those of the farther memory (Move::lines_of).
//
// A thread has kInFlight units on the wire at once: all are loaded before the first is stored, and
// between the two the row numbers of its next units are fetched, which then cost no time of their
// own. 1,024 threads with four units hold 55 KiB of such rows in flight, more than the link has
// room for in a round trip, so that two to four blocks are enough.
//
// Row and column of a thread's units advance by a fixed step and carry: a division by the number of
// units in 64 bits, which a flat index of two thousand million rows would need, costs as much as
// the rest of the loop.
//
// The host sees the rows of a scatter once the event behind the kernel has passed; no fence here.
#include "move.cuh"

namespace {

constexpr i32 kLineBytes = 128;
constexpr u32 kRowBytes = ESS_ROW_BYTES;
constexpr i32 kSpanUnits = ESS_SPAN_BYTES / ESS_UNIT_BYTES;
constexpr i32 kInFlight = ESS_IN_FLIGHT;
static_assert(ESS_ROW_BYTES % ESS_UNIT_BYTES == 0, "a row is whole units");
static_assert(ESS_SPAN_BYTES % kLineBytes == 0, "a span is whole lines");
static_assert(ESS_SPAN_BYTES >= ESS_ROW_BYTES, "a span holds a row");
static_assert(ESS_UNIT_BYTES == sizeof(Unit), "units are 4, 8 or 16 bytes");

struct Place {
    i32 pair;
    i32 column;

    __device__ static Place of(i32 units) { return {units / kSpanUnits, units % kSpanUnits}; }

    __device__ void advance(Place by) {
        pair += by.pair;
        column += by.column;
        if (column >= kSpanUnits) {
            column -= kSpanUnits;
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
        u8* to[kInFlight];
#pragma unroll
        for (i32 j = 0; j < kInFlight; j++) {
            to[j] = nullptr;
            if (ahead.source[j] < 0 || ahead.target[j] < 0) continue;
            const u8* source = move.source_at(ahead.source[j]);
            u8* target = move.target_at(ahead.target[j]);
            const u64 far = u64(move.lines_of == 0 ? source : target);
            const i32 byte = ahead.column[j] * ESS_UNIT_BYTES - i32(far % kLineBytes);
            if (u32(byte) >= kRowBytes) continue;
            held[j] = load_unit((const Unit*)(source + byte));
            to[j] = target + byte;
        }
        at.advance(leap);
        ahead.look(move, count, at, step);
#pragma unroll
        for (i32 j = 0; j < kInFlight; j++)
            if (to[j] != nullptr) store_unit((Unit*)to[j], held[j]);
    }
}
