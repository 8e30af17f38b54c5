// observe() of ess/pool/lru/specification.py: the ranks of all rows of the step's queries follow
// the indexer's logits, which the selections were made from.
//
// ess_scale has a block for each query: its selection says how logits become scores, and each page
// of its context learns the first and the last query that have it. ess_follow has a warp for each
// page of a query. Queries take effect in their order, and several may see one row: drafts, and
// requests with one prefix. A page lies at one place of all contexts that have it, so the warp of
// the first query that has it lets all up to the last take effect, in order, and the others leave
// it alone: no two warps touch one rank. Then the page has no queries again, as before the call.
// Scores are sums, products and one quotient, each rounded once, and never contracted, so all
// implementations have the same bits.
//
// Wrong if one page lay at two places of contexts; pages are of prefixes or of one request.
#include "resolve.cuh"

namespace {

constexpr i32 kScoreFloor = 128;
constexpr i32 kScoreMax = 255;
constexpr i32 kScoreShift = 2;
constexpr i32 kLaneRows = kPageRows / 32;
constexpr i32 kInfinity = 0x7F800000;
constexpr i32 kSign = -2147483647 - 1;
constexpr i32 kQueries = 1 << 30;

// Of a page: kQueries less the first query that has it, one more than the last; or zeros.
struct Holders {
    i32 first, last;
};

struct Scale {
    float floor, factor;

    __device__ i32 score(float logit) const {
        const float level = __fadd_rn(kScoreFloor, __fmul_rn(__fsub_rn(logit, floor), factor));
        const float below = level < float(kScoreMax) ? level : float(kScoreMax);
        return i32(below > 0 ? below : 0);
    }
};

struct Observe {
    Selection selection;
    const float* logits;
    u16* rank_of;
    Scale* scales;
    Holders* holders;
    const i32* queries;
    Report* report;
    i64 query_first;
    i64 query_max;
    i64 stride;
    i64 blocks_each;

    __device__ i32 query_count() const {
        const i64 left = *queries - query_first;
        return i32(left < 0 ? 0 : left < query_max ? left : query_max);
    }

    // How many positions of a query have logits and pages: all of its context.
    __device__ i32 length(i32 query) const {
        const i64 most = selection.table_width * kPageRows;
        const i64 room = most < stride ? most : stride, given = selection.length[query];
        return i32(given < room ? given : room);
    }

    __device__ i32 page_id(i32 query, i32 page) const {
        return selection.page_table[selection.table_row[query] * selection.table_width + page];
    }

    __device__ bool is_page(i32 id) const {
        return id >= 0 && (i64(id) + 1) * kPageRows <= selection.row_count;
    }

    __device__ bool has(i32 query, i32 page, i32 id) const {
        return page * kPageRows < length(query) && page_id(query, page) == id;
    }

    __device__ void hold(i32 query, i32 page) const {
        const i32 id = page_id(query, page);
        if (!is_page(id)) return;
        atomicMax(&holders[id].first, kQueries - query);
        atomicMax(&holders[id].last, query + 1);
    }

    // A query's positions of a page take effect on these ranks.
    __device__ void take(i32 query, i32 page, i32 (&rank)[kLaneRows]) const {
        const Scale scale = scales[query];
        const i32 stop = length(query);
#pragma unroll
        for (i32 i = 0; i < kLaneRows; i++) {
            const i32 position = page * kPageRows + i * 32 + i32(threadIdx.x) % 32;
            if (position >= stop) continue;
            const i32 aim = scale.score(logits[query * stride + position]) << 8;
            rank[i] = rank[i] == 0 ? aim : rank[i] + ((aim - rank[i]) >> kScoreShift);
        }
    }

    __device__ void follow(i32 query, i32 page) const {
        const i32 id = page_id(query, page), lane = threadIdx.x % 32;
        if (!is_page(id)) {
            if (lane == 0) atomicAdd(&report->faults, 1);
            return;
        }
        Holders* held = holders + id;
        const i32 first = __shfl_sync(kAllLanes, lane == 0 ? load_relaxed(&held->first) : 0, 0);
        if (first != kQueries - query) return;
        const i32 stop = __shfl_sync(kAllLanes, lane == 0 ? load_relaxed(&held->last) : 0, 0);
        u16* ranks = rank_of + i64(id) * kPageRows + lane;
        i32 rank[kLaneRows];
        for (i32 i = 0; i < kLaneRows; i++) rank[i] = ranks[i * 32];
        for (i32 base = query; base < stop; base += 32) {
            const bool shares = base + lane < stop && has(base + lane, page, id);
            u32 sharers = __ballot_sync(kAllLanes, shares);
            for (; sharers != 0; sharers &= sharers - 1)
                take(base + __popc((sharers & -sharers) - 1), page, rank);
        }
        for (i32 i = 0; i < kLaneRows; i++) ranks[i * 32] = u16(rank[i]);
        if (lane != 0) return;
        store_relaxed(&held->first, 0);
        store_relaxed(&held->last, 0);
    }
};

// Numbers in the order of the floats that have these bits, and back.
__device__ i32 ordered(i32 bits) { return bits < 0 ? bits ^ 0x7FFFFFFF : bits; }

}  // namespace

ESS_KERNEL __launch_bounds__(kThreads) ess_scale(const __grid_constant__ Observe call) {
    ESS_SHARED i32 least, most;
    const i32 query = blockIdx.x;
    if (query >= call.query_count()) return;
    if (threadIdx.x == 0) {
        least = ordered(kInfinity);
        most = ordered(kInfinity | kSign);
    }
    __syncthreads();
    const i64 width = call.selection.width;
    const i32 stop = call.length(query);
    for (i64 i = threadIdx.x; i < width; i += kThreads) {
        const i32 position = call.selection.positions[query * width + i];
        if (position < 0) continue;
        if (position >= stop) atomicAdd(&call.report->faults, 1);
        const float logit = position < stop ? call.logits[query * call.stride + position] : 0;
        if (position >= stop || logit != logit) continue;
        const i32 bits = __float_as_int(logit);
        atomicMin(&least, ordered(bits));
        atomicMax(&most, ordered(bits));
    }
    for (i32 page = threadIdx.x; page * kPageRows < stop; page += kThreads) call.hold(query, page);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (call.selection.length[query] > stop) atomicAdd(&call.report->faults, 1);
    const float floor = __int_as_float(ordered(least));
    const float span = __fsub_rn(__int_as_float(ordered(most)), floor);
    const float factor = span > 0 ? __fdiv_rn(kScoreMax - kScoreFloor, span) : 0;
    call.scales[query] = {floor, factor};
}

ESS_KERNEL __launch_bounds__(kThreads) ess_follow(const __grid_constant__ Observe call) {
    const i32 query = blockIdx.x / i32(call.blocks_each);
    if (query >= call.query_count()) return;
    const i32 block = blockIdx.x % i32(call.blocks_each), warp = threadIdx.x / 32;
    const i32 pages = (call.length(query) + kPageRows - 1) / kPageRows;
    for (i32 page = block * kWarps + warp; page < pages; page += i32(call.blocks_each) * kWarps)
        call.follow(query, page);
}
