// Index logits: scale of the key * sum over heads of weight * relu(query . key).
//
// A page is decoded once per query and multiplied in blocks of eight keys by a vector or two of
// heads. Heads are lanes; what they weigh is added lane by lane over the vectors and across lanes
// at the end, always in the same order. Keys behind the query's length are computed with the rest
// of their page, whatever they hold, and dropped by the caller.
//
// Products are taken in bf16 where both sides fit: fp8 keys, and queries in fp8 or bf16.
#pragma once

constexpr int64_t kPageKeys = 64;

struct IndexWork {
    uint32_t* packed;
    uint32_t* keys;
    float* weights;  // by lane: the head's in the first of its lanes, 0 in the others
};

ESS_LANE IndexWork index_work(const Packing& query) {
    const int64_t packed = round_up(query.word_count() * 4, 64);
    const int64_t keys = round_up(kPageKeys * query.words * 4, 64);
    uint8_t* at = (uint8_t*)scratch(Use::index, packed + keys + query.width * 4);
    return {(uint32_t*)at, (uint32_t*)(at + packed), (float*)(at + packed + keys)};
}

// The values of a page's keys as words; float32 pages are words as they lie.
template <bool half>
ESS_LANE const uint32_t* page_words(const Index& call, const uint8_t* page, uint32_t* to) {
    if (call.key_form == Form::f32) return (const uint32_t*)page;
    ESS_DECODE_GROUP<half>(page, 1.0f, kPageKeys * call.key_dim, (char*)to);
    return to;
}

// An eighth of the next page, line by line.
struct NextPage {
    const uint8_t* from;
    int64_t lines;

    __attribute__((always_inline)) void request(int64_t step) const {
        if (step < lines) __builtin_prefetch(from + 64 * step, 0, 2);
    }
    bool wants(int64_t step) const { return step < lines; }
};

template <bool half, int spread, int vectors, typename Later>
ESS_LANE void index_block(const Packing& query, const uint32_t* keys, const uint32_t* packed,
                          const float* weights, const Later& later, Floats (&totals)[kKeys]) {
    Floats sums[kKeys][vectors] = {};
    multiply<half, spread>({keys, query.words, spread}, packed, query.width, query.steps(), sums,
                           later);
    for (int64_t i = 0; i < kKeys; i++)
        for (int v = 0; v < vectors; v++) {
            const Floats logit = fold<spread>(sums[i][v]);
            totals[i] = multiply_add(logit < 0.0f ? Floats{} : logit,
                                     load<Floats>(weights + v * kLanes), totals[i]);
        }
}

template <bool half, int spread, int vectors>
ESS_LANE void index_page(const Packing& query, const IndexWork& work, const uint32_t* keys,
                         NextPage next, float* logits) {
    for (int64_t key = 0; key < kPageKeys; key += kKeys, next.from += 64 * next.lines) {
        Floats totals[kKeys] = {};
        const uint32_t* from = keys + key * query.words;
        index_block<half, spread, vectors>(query, from, work.packed, work.weights, next, totals);
        constexpr int64_t width = vectors * kLanes;
        int64_t lane = width;
        for (; lane + width <= query.width; lane += width)
            index_block<half, spread, vectors>(query, from, work.packed + lane,
                                               work.weights + lane, Nothing{}, totals);
        if (lane < query.width)
            index_block<half, spread, 1>(query, from, work.packed + lane, work.weights + lane,
                                         Nothing{}, totals);
        for (int64_t i = 0; i < kKeys; i++) logits[key + i] = total(totals[i]);
    }
}

template <bool half>
void index_in(const Index& call, int64_t query, int64_t first, int64_t last, float* logits) {
    const Packing packing(call.head_count, call.head_count, call.key_dim / (half ? 2 : 1));
    const IndexWork work = index_work(packing);
    pack<half>(packing, call.queries + query * call.query_stride, call.query_form,
               call.head_stride, work.packed);
    __builtin_memset(work.weights, 0, packing.width * 4);
    for (int64_t head = 0; head < call.head_count; head++)
        work.weights[head * packing.spread] = call.weights[query * call.head_count + head];
    const auto page_at = [&](int64_t i) {
        return call.pages.base + call.table[query * call.table_stride + i] * call.pages.stride;
    };
    const int64_t page_bytes = kPageKeys * (call.key_form == Form::f32 ? 4 * call.key_dim
                                                                       : call.key_dim + 4);
    for (int64_t i = first; i < last; i++, logits += kPageKeys) {
        const uint8_t* from = page_at(i);
        const NextPage next{page_at(i + 1 < last ? i + 1 : i),
                            i + 1 < last ? (page_bytes / 64 + kKeys - 1) / kKeys : 0};
        const uint32_t* keys = page_words<half>(call, from, work.keys);
        if (packing.spread == 4)
            index_page<half, 4, 1>(packing, work, keys, next, logits);
        else if (packing.spread == 2)
            index_page<half, 2, 1>(packing, work, keys, next, logits);
        else if (packing.width == kLanes)
            index_page<half, 1, 1>(packing, work, keys, next, logits);
        else
            index_page<half, 1, 2>(packing, work, keys, next, logits);
        if (call.key_form == Form::f32) continue;
        const float_any* scales = (const float_any*)(from + kPageKeys * call.key_dim);
        for (int64_t key = 0; key < kPageKeys; key++) logits[key] *= scales[key];
    }
}

void index(const Index& call, int64_t query, int64_t first, int64_t last, float* logits) {
#if ESS_HALF
    if (call.key_form == Form::fp8 && call.query_form != Form::f32)
        return index_in<true>(call, query, first, last, logits);
#endif
    index_in<false>(call, query, first, last, logits);
}
