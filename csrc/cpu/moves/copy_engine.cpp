// Queues a fetch through the copy engine of a device: for each chunk seven calls of the driver,
// without Python in between. The driver's functions come as pointers, so nothing links against it.
//
// A chunk is gathered by a host function on a stream of its own into a place of pinned memory, sent
// to the place's twin on the device, and spread from there by a kernel. Places are used in turn: an
// event behind the gathering lets the chunk be sent, another behind the spreading frees the place.
#include <algorithm>

#include "../native.h"
#include "rows.h"

namespace ess {
namespace {

// The move of csrc/flashtrans/move.cuh, without its methods.
struct Move {
    uint64_t source, source_rows;
    int64_t source_stride;
    uint64_t target, target_rows;
    int64_t target_stride;
    uint64_t count;
    int64_t count_max, lines_of;
};

struct Driver {
    int (*host_func)(void* stream, void (*run)(void*), void* argument);
    int (*copy_down)(uint64_t to, const void* from, size_t bytes, void* stream);
    int (*launch)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  unsigned, void* stream, void** arguments, void** extra);
    int (*record)(void* event, void* stream);
    int (*hold)(void* stream, void* event, unsigned flags);
};

// The ctypes twin is StagedFetch of ess/flashtrans/staging.py.
struct StagedFetch {
    Driver driver;
    void* gathering;
    void* sending;
    uint8_t* host;
    uint64_t twin;
    int64_t place_bytes, place_count, turn;
    void* const* gathered;
    void* const* spread;
    RowCopy copy;
    int64_t threads, stream_above;
    RowJob* jobs;
    const int64_t* chunk_rows;
    int64_t chunk_count;
    void* kernel;
    Move move;
    int64_t block_threads, block_rows, block_count_max;
};

void gather(void* job) {
    const RowJob& given = *static_cast<const RowJob*>(job);
    copy_rows(given.copy, int(given.threads), given.stream_above);
}

RowSide from_row(RowSide side, int64_t first) {
    if (side.index_bytes)
        side.list = static_cast<const uint8_t*>(side.list) + first * side.index_bytes;
    else
        side.base += first * side.stride;
    return side;
}

RowJob job_of(const StagedFetch& fetch, int64_t first, int64_t rows) {
    const int64_t row_bytes = fetch.copy.row_bytes;
    uint8_t* place = fetch.host + fetch.turn * fetch.place_bytes;
    const RowSide dense = {place, row_bytes, rows, nullptr, 0};
    const RowCopy copy = {from_row(fetch.copy.source, first), dense, rows, row_bytes};
    return {copy, fetch.threads, fetch.stream_above};
}

Move move_of(const StagedFetch& fetch, int64_t first, int64_t rows) {
    Move move = fetch.move;
    move.source = fetch.twin + uint64_t(fetch.turn * fetch.place_bytes);
    move.count_max = rows;
    if (move.target_rows)
        move.target_rows += uint64_t(first) * sizeof(int32_t);
    else
        move.target += uint64_t(first * move.target_stride);
    return move;
}

int queue_chunk(const StagedFetch& fetch, RowJob& job, int64_t first, int64_t rows) {
    const Driver& driver = fetch.driver;
    void* gathered = fetch.gathered[fetch.turn];
    void* spread = fetch.spread[fetch.turn];
    job = job_of(fetch, first, rows);
    Move move = move_of(fetch, first, rows);
    void* arguments[] = {&move};
    const int64_t wanted = (rows + fetch.block_rows - 1) / fetch.block_rows;
    const unsigned blocks = unsigned(std::min(wanted, fetch.block_count_max));
    const size_t bytes = size_t(rows * fetch.copy.row_bytes);
    int status = driver.hold(fetch.gathering, spread, 0);
    if (!status) status = driver.host_func(fetch.gathering, gather, &job);
    if (!status) status = driver.record(gathered, fetch.gathering);
    if (!status) status = driver.hold(fetch.sending, gathered, 0);
    if (!status) status = driver.copy_down(move.source, job.copy.target.base, bytes, fetch.sending);
    if (!status)
        status = driver.launch(fetch.kernel, blocks, 1, 1, unsigned(fetch.block_threads), 1, 1, 0,
                               fetch.sending, arguments, nullptr);
    return status ? status : driver.record(spread, fetch.sending);
}

}  // namespace
}  // namespace ess

// What the driver answers: 0, or why not all is queued. `jobs` and the lists must live until the
// stream `sending` has come this far.
ESS_EXPORT int32_t ess_staged_fetch(ess::StagedFetch* fetch) {
    int64_t first = 0;
    for (int64_t chunk = 0; chunk < fetch->chunk_count; chunk++) {
        const int64_t rows = fetch->chunk_rows[chunk];
        const int status = ess::queue_chunk(*fetch, fetch->jobs[chunk], first, rows);
        if (status) return status;
        first += rows;
        fetch->turn = (fetch->turn + 1) % fetch->place_count;
    }
    return 0;
}
