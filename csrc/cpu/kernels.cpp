// The door of the compute kernels: ids are looked at before anything is written, work is cut into
// pieces, the crew takes them.
#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "crew.h"

namespace ess {
namespace {

constexpr int64_t kPiecePages = 64;
constexpr int64_t kPiecePagesLeast = 8;
constexpr int64_t kRunQueries = 12;  // a page's decoding counts little then, and all fit the caches
constexpr int64_t kScreenQueries = 64;  // a page's rounding counts little then
constexpr int64_t kScreenQueriesLeast = 8;
constexpr int64_t kScreenShare = 8;      // with fewer keys for each that is wanted, too many stay,
constexpr int64_t kScreenShareHalf = 64;  // and sooner where products in bf16 are the other way
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

// Whether `query` may join `run`: it must find the same pages where it looks, and look about as
// far, because a run is computed as far as its longest query reaches.
bool joins(const Index& call, const Run& run, int64_t query, int64_t most) {
    const int64_t pages = page_count(call, query), others = page_count(call, run.longest);
    if (run.count == most || pages > others + 1 || others > pages + 1) return false;
    const int32_t* table = call.table + query * call.table_stride;
    const int32_t* other = call.table + run.longest * call.table_stride;
    return std::equal(table, table + std::min(pages, others), other);
}

std::vector<Run> runs_of(const Index& call, int64_t first, int64_t stop, int64_t most) {
    std::vector<Run> runs;
    for (int64_t query = first; query < stop; query++) {
        if (runs.empty() || !joins(call, runs.back(), query, most))
            runs.push_back({query, 0, query});
        Run& run = runs.back();
        run.count++;
        if (page_count(call, query) > page_count(call, run.longest)) run.longest = query;
    }
    return runs;
}

std::vector<Run> runs_of(const Index& call) {
    return runs_of(call, 0, call.query_count, kRunQueries);
}

// Whether a run's top-k is found faster without all logits: many queries share a page, and most of
// its keys are out.
int64_t screened_from(const Index& call, int64_t k) {
    return (is_half(call) ? kScreenShareHalf : kScreenShare) * k;
}

// Where tiles take the products, all logits are found faster (with four heads up to 128K keys, not
// at 256K), and a screen's exact logits would have to be made by tiles too.
bool may_screen(const Index& call, int64_t k) {
    if (is_half(call) && in_tiles(call.key_dim / 2)) return false;
    const bool fits = call.key_dim % 64 == 0 && call.key_dim <= 256;
    return kernels().select && fits && call.query_count >= kScreenQueriesLeast &&
           call.table_width * kPageKeys >= screened_from(call, k);
}

bool screens(const Index& call, const Run& run, int64_t k) {
    return run.count >= kScreenQueriesLeast && call.lengths[run.longest] >= screened_from(call, k);
}

// Long runs where a screen takes them; of others all logits are made, so they are cut.
std::vector<Run> runs_to_select(const Index& call, int64_t k) {
    if (!may_screen(call, k)) return runs_of(call);
    std::vector<Run> runs;
    for (const Run& run : runs_of(call, 0, call.query_count, kScreenQueries)) {
        const int64_t most = screens(call, run, k) ? run.count : kRunQueries;
        const std::vector<Run> cut = runs_of(call, run.first, run.first + run.count, most);
        runs.insert(runs.end(), cut.begin(), cut.end());
    }
    return runs;
}

// Pages of a piece: many, but so that no thread goes without where there are fewer runs.
int64_t piece_pages(int64_t pages, int64_t run_count, int32_t threads) {
    const int64_t sharers = (threads + run_count - 1) / std::max<int64_t>(1, run_count);
    const int64_t share = (pages + sharers - 1) / std::max<int64_t>(1, sharers);
    return std::min(kPiecePages, std::max(kPiecePagesLeast, share));
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

ESS_EXPORT int32_t ess_has_tiles() { return ess::has_tiles(); }

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
    const std::vector<Run> runs = runs_of(*call);
    const int64_t some = piece_pages(call->table_width, runs.size(), threads);
    const int64_t per_run = call->table_width / some + 1;
    run_pieces(threads, int64_t(runs.size()) * per_run, [&](int64_t piece) {
        const Run& run = runs[piece / per_run];
        const int64_t first = piece % per_run * some, pages = page_count(*call, run.longest);
        float* rows = logits + run.first * stride;
        if (first < pages)
            kernels().index(*call, run, first, std::min(first + some, pages), rows, stride);
        for (int64_t i = 0; first == 0 && i < run.count; i++)
            fill(rows + i * stride + call->lengths[run.first + i],
                 rows + i * stride + call->table_width * kPageKeys);
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

// Both in one: the logits of a run live in scratch and nowhere else, where they are needed at all.
ESS_EXPORT int32_t ess_index_top_k(const ess::Index* call, int64_t k, int32_t* out,
                                   int32_t threads, int64_t* span) {
    using namespace ess;
    if (int32_t fault = index_fault(*call, span)) return fault;
    const bool may = may_screen(*call, k);
    const std::vector<Run> runs = runs_to_select(*call, k);
    const int64_t run_count = runs.size();
    const int32_t inside = run_count < threads ? threads : 1;
    run_pieces(inside > 1 ? 1 : threads, run_count, [&](int64_t at) {
        const Run& run = runs[at];
        if (may && screens(*call, run, k))
            return kernels().select(*call, run, k, out + run.first * k);
        const int64_t pages = page_count(*call, run.longest), stride = pages * kPageKeys;
        const int64_t some = piece_pages(pages, 1, inside);
        float* logits = static_cast<float*>(scratch(Use::logits, 4 * run.count * stride + 64));
        run_pieces(inside, (pages + some - 1) / some, [&](int64_t piece) {
            const int64_t first = piece * some;
            kernels().index(*call, run, first, std::min(first + some, pages), logits, stride);
        });
        run_pieces(inside, run.count, [&](int64_t i) {
            const int64_t query = run.first + i;
            kernels().top_k(logits + i * stride, call->lengths[query], k, out + query * k);
        });
    });
    return 0;
}

ESS_EXPORT void ess_merge(const ess::Merge* call) { ess::kernels().merge(*call); }
