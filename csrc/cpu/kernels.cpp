// The door of the compute kernels: ids are looked at before anything is written, work is cut into
// pieces, the crew takes them.
#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "crew.h"

namespace ess {
namespace {

constexpr int64_t kPageKeys = 64;
constexpr int64_t kPiecePages = 64;
constexpr int64_t kHeadUnit = 16;

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

struct Room {
    std::unique_ptr<void, Free> memory;
    int64_t bytes = 0;
};

// What a list of ids spans; empty lists span nothing.
struct Span {
    int64_t least = std::numeric_limits<int64_t>::max();
    int64_t greatest = std::numeric_limits<int64_t>::min();

    void add(const int32_t* ids, int64_t count) {
        int32_t low = std::numeric_limits<int32_t>::max(), high = ~low;
        for (int64_t i = 0; i < count; i++) {
            low = std::min(low, ids[i]);
            high = std::max(high, ids[i]);
        }
        if (count == 0) return;
        least = std::min<int64_t>(least, low);
        greatest = std::max<int64_t>(greatest, high);
    }
    bool within(int64_t low, int64_t limit) const {
        return least > greatest || (least >= low && greatest < limit);
    }
};

int64_t page_count(const Index& call, int64_t query) {
    return (call.lengths[query] + kPageKeys - 1) / kPageKeys;
}

void fill(float* from, float* to) { std::fill(from, to, -std::numeric_limits<float>::infinity()); }

// Logits of one query in pieces of pages. The last page may reach past the query's length: it is
// computed aside.
void index_piece(const Index& call, int64_t query, int64_t piece, float* logits) {
    const int64_t first = piece * kPiecePages;
    const int64_t last = std::min(first + kPiecePages, page_count(call, query));
    const int64_t whole = std::min(last, int64_t(call.lengths[query]) / kPageKeys);
    if (whole > first) kernels().index(call, query, first, whole, logits + first * kPageKeys);
    if (last <= whole) return;
    float page[kPageKeys];
    kernels().index(call, query, whole, last, page);
    std::copy(page, page + (call.lengths[query] - whole * kPageKeys), logits + whole * kPageKeys);
}

int64_t index_piece_count(const Index& call, int64_t query) {
    return (page_count(call, query) + kPiecePages - 1) / kPiecePages;
}

int32_t index_fault(const Index& call, int64_t* span) {
    Span lengths, pages;
    lengths.add(call.lengths, call.query_count);
    span[0] = lengths.least, span[1] = lengths.greatest;
    if (!lengths.within(0, call.table_width * kPageKeys + 1)) return 1;
    for (int64_t query = 0; query < call.query_count; query++)
        pages.add(call.table + query * call.table_stride, page_count(call, query));
    span[0] = pages.least, span[1] = pages.greatest;
    return pages.within(0, call.pages.count) ? 0 : 2;
}

int32_t lengths_fault(const int32_t* lengths, int64_t count, int64_t width, int64_t* span) {
    Span given;
    given.add(lengths, count);
    span[0] = given.least, span[1] = given.greatest;
    return given.within(0, width + 1) ? 0 : 1;
}

}  // namespace

const Kernels& kernels() {
    if (isa() == Isa::portable) return kernels_portable;
    if (isa() == Isa::avx2) return kernels_avx2;
    return has_bf16() ? kernels_avx512_bf16 : kernels_avx512;
}

void* scratch(Use use, int64_t bytes) {
    static thread_local Room rooms[int(Use::count)];
    Room& room = rooms[int(use)];
    if (room.bytes < bytes) {
        room.memory.reset();
        room.bytes = 0;
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, bytes)) throw std::bad_alloc();
        room.memory.reset(memory);
        room.bytes = bytes;
    }
    return room.memory.get();
}

}  // namespace ess

ESS_EXPORT const char* ess_kernels_name() { return ess::kernels().name; }

// 0: done. 1: nothing done, a slot is out of range; `span` is what the slots span.
ESS_EXPORT int32_t ess_attend(const ess::Attend* call, int32_t threads, int64_t* span) {
    using namespace ess;
    Span slots;
    for (int64_t query = 0; query < call->query_count; query++)
        slots.add(call->slots + query * call->slot_stride, call->slot_count);
    span[0] = slots.least, span[1] = slots.greatest;
    if (!slots.within(-1 - call->placed.count, call->rows.count)) return 1;
    const int64_t units = (call->head_count + kHeadUnit - 1) / kHeadUnit;
    const int64_t share = std::max<int64_t>(1, threads / std::max<int64_t>(1, call->query_count));
    const int64_t heads = (units + share - 1) / share * kHeadUnit;
    const int64_t blocks = (call->head_count + heads - 1) / heads;
    run_pieces(threads, call->query_count * blocks, [&](int64_t piece) {
        const int64_t first = piece % blocks * heads;
        kernels().attend(*call, piece / blocks, first, std::min(first + heads, call->head_count));
    });
    return 0;
}

// Logits [query, 64 * table width], -inf behind the length. 1: a length, 2: a page is out of range.
ESS_EXPORT int32_t ess_index_logits(const ess::Index* call, float* logits, int64_t stride,
                                    int32_t threads, int64_t* span) {
    using namespace ess;
    if (int32_t fault = index_fault(*call, span)) return fault;
    const int64_t per_query = call->table_width / kPiecePages + 1;
    run_pieces(threads, call->query_count * per_query, [&](int64_t piece) {
        const int64_t query = piece / per_query;
        float* row = logits + query * stride;
        if (piece % per_query < index_piece_count(*call, query))
            index_piece(*call, query, piece % per_query, row);
        if (piece % per_query == 0)
            fill(row + call->lengths[query], row + call->table_width * kPageKeys);
    });
    return 0;
}

ESS_EXPORT int32_t ess_top_k(const float* logits, int64_t stride, int64_t width, int64_t count,
                             const int32_t* lengths, int64_t k, int32_t* out, int32_t threads,
                             int64_t* span) {
    using namespace ess;
    if (int32_t fault = lengths_fault(lengths, count, width, span)) return fault;
    run_pieces(threads, count, [&](int64_t query) {
        kernels().top_k(logits + query * stride, lengths[query], k, out + query * k);
    });
    return 0;
}

// Both in one: the logits of a query live in scratch and nowhere else.
ESS_EXPORT int32_t ess_index_top_k(const ess::Index* call, int64_t k, int32_t* out,
                                   int32_t threads, int64_t* span) {
    using namespace ess;
    if (int32_t fault = index_fault(*call, span)) return fault;
    const bool alone = call->query_count < threads;
    run_pieces(alone ? 1 : threads, call->query_count, [&](int64_t query) {
        float* logits = static_cast<float*>(scratch(Use::logits, 4 * call->lengths[query] + 64));
        run_pieces(alone ? threads : 1, index_piece_count(*call, query),
                   [&](int64_t piece) { index_piece(*call, query, piece, logits); });
        kernels().top_k(logits, call->lengths[query], k, out + query * k);
    });
    return 0;
}

ESS_EXPORT void ess_merge(const ess::Merge* call) { ess::kernels().merge(*call); }
