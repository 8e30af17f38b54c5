// Index logits: scale of the key * sum over heads of weight * relu(query . key).
//
// A page is decoded once for all queries of a run and multiplied in blocks of a few keys by up to
// three vectors of heads, of whichever query: few heads fill one vector with all of a query's, many
// heads take several. Heads are lanes; what they weigh is added lane by lane over the vectors of a
// query and across lanes at the end, always in the same order, so a query gets the same bits in any
// run. Keys behind the query's length are computed with the rest of their page, whatever they hold,
// and dropped.
//
// Products are taken in bf16 where both sides fit: fp8 keys, and queries in fp8 or bf16. Where
// there are tiles, tiles take these, in whole vectors of one query's heads: compiled with ESS_TILES
// this file is that part alone.
#pragma once

constexpr int64_t kIndexKeys = kLanes == 16 ? 8 : 4;
constexpr int kIndexVectors = kLanes == 4 ? 2 : 3;
constexpr int kUsualWords = 64;  // of keys of 128 values in bf16

// The queries of a run, packed: vector v of heads at packed + v * panel, [step, lane].
struct IndexWork {
    int64_t spread, words, steps, panel;
    int64_t per_query;  // vectors
    uint32_t* packed;
    float* weights;  // [vector, lane]
    uint32_t* keys;  // of a page
    Floats* begun;   // by key, what the vectors of a query that is not through have summed up
    float* logits;   // [query, key] of a page

    IndexWork(const Index& call, int64_t query_count, bool half)
        : spread(ESS_TILES ? 1 : spread_of(call.head_count, call.key_dim / (half ? 2 : 1))),
          words(call.key_dim / (half ? 2 : 1)), steps(words / spread), panel(steps * kLanes),
          per_query(round_up(call.head_count * spread, kLanes) / kLanes) {
        const uintptr_t bytes = carve(0, query_count);
        carve((uintptr_t)scratch(Use::index, int64_t(bytes)), query_count);
    }

private:
    // Lays the arrays out from `at` on; returns where they end.
    uintptr_t carve(uintptr_t at, int64_t query_count) {
        const int64_t vectors = query_count * per_query;
        lay(at, packed, vectors * panel);
        lay(at, weights, vectors * kLanes);
        lay(at, keys, kPageKeys * words);
        lay(at, begun, kPageKeys);
        lay(at, logits, query_count * kPageKeys);
        return at;
    }
};

// The head that a lane stands for once `fold_keys` has added the lanes that a head takes.
ESS_LANE int64_t head_of(int64_t lane, int64_t spread) {
    return lane / 4 * (4 / spread) + lane % (4 / spread);
}

template <bool half>
ESS_LANE void pack_run(const Index& call, const Run& run, const IndexWork& work) {
    for (int64_t i = 0; i < run.count * work.per_query; i++) {
        const int64_t query = run.first + i / work.per_query;
        const int64_t first = i % work.per_query * kLanes, rest = call.head_count - first;
        const int64_t of_heads = work.spread == 1 ? kLanes : call.head_count;
        const Packing vector(rest < kLanes ? rest : kLanes, of_heads, work.words);
        pack<half>(vector, call.queries + query * call.query_stride + first * call.head_stride,
                   call.query_form, call.head_stride, work.packed + i * work.panel);
        for (int64_t lane = 0; lane < kLanes; lane++) {
            const int64_t head = first + head_of(lane, work.spread);
            work.weights[i * kLanes + lane] =
                head < call.head_count ? call.weights[query * call.head_count + head] : 0.0f;
        }
    }
}

// The values of a page's keys as words; float32 pages are words as they lie.
template <bool half>
ESS_LANE const uint32_t* page_words(const Index& call, const uint8_t* page, uint32_t* to) {
    if (call.key_form == Form::f32) return (const uint32_t*)page;
    ESS_DECODE_GROUP<half>(page, 1.0f, kPageKeys * call.key_dim, (char*)to);
    return to;
}

// The next page, or a part of it, line by line.
struct NextPage {
    const uint8_t* from;
    int64_t lines;

    NextPage part(int64_t at, int64_t count) const {
        const int64_t share = (lines + count - 1) / count;
        return {from + 64 * share * at, share};
    }
    __attribute__((always_inline)) void request(int64_t step) const {
        if (step < lines) __builtin_prefetch(from + 64 * step, 0, 2);
    }
    bool wants(int64_t step) const { return step < lines; }
};

// Adds neighbouring lanes, `by` of them, within quarters of a vector; a quarter of what comes out
// holds the sums of `by` vectors, one behind the other.
template <int by, int count>
ESS_LANE void fold_keys(Floats* sums) {
    for (int left = count / 2; left > count / 2 / by; left /= 2)
        for (int i = 0; i < left; i++)
            sums[i] = ESS_PICK(sums[2 * i], sums[2 * i + 1], 0x88) +
                      ESS_PICK(sums[2 * i], sums[2 * i + 1], 0xDD);
}

// Adds the quarters of vectors that hold four keys each.
ESS_LANE void store_keys(const Floats* sums, float* to) {
#if ESS_LANES == 16
    const __m512 a = (__m512)sums[0], b = (__m512)sums[1];
    __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    sum = _mm512_add_ps(_mm512_shuffle_f32x4(sum, sum, 0x88),
                        _mm512_shuffle_f32x4(sum, sum, 0xDD));
    _mm256_storeu_ps(to, _mm512_castps512_ps256(sum));
#elif ESS_LANES == 8
    const __m256 sum = (__m256)sums[0];
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
#else
    store(to, sums[0]);
#endif
}

// What the heads of one vector give to a block of keys.
template <int spread, typename Work>
ESS_LANE void weigh(const Work& work, int64_t vector, int64_t key, Floats (&sums)[kIndexKeys]) {
    constexpr int count = kIndexKeys / spread;
    const int64_t query = spread > 1 ? vector : vector / work.per_query;
    const int64_t part = spread > 1 ? 0 : vector % work.per_query;
    const Floats weights = load<Floats>(work.weights + vector * kLanes);
    fold_keys<spread, kIndexKeys>(sums);
    for (int i = 0; i < count; i++) {
        const Floats before = part ? work.begun[key + i] : Floats{};
        sums[i] = multiply_add(sums[i] < 0.0f ? Floats{} : sums[i], weights, before);
    }
    if (spread == 1 && part + 1 < work.per_query) {
        for (int i = 0; i < count; i++) work.begun[key + i] = sums[i];
        return;
    }
    fold_keys<4 / spread, count>(sums);
    store_keys(sums, work.logits + query * kPageKeys + key);
}

// `known`: the words of a key, or 0. With a distance that the compiler knows, the addresses of all
// keys of a block are one register's; else they are spilled, into vector registers even.
template <bool half, int spread, int vectors, int blocks, int known>
ESS_LANE void index_block(const IndexWork& work, const uint32_t* keys, int64_t key, int64_t vector,
                          const NextPage& next) {
    Floats sums[blocks * kIndexKeys][vectors] = {};
    const int64_t words = known ? known : work.words;
    multiply<half, spread>({keys + key * words, words, spread}, work.packed + vector * work.panel,
                           kLanes, words / spread, sums, next, work.panel);
    for (int v = 0; v < vectors; v++)
        for (int block = 0; block < blocks; block++) {
            Floats mine[kIndexKeys];
            for (int i = 0; i < kIndexKeys; i++) mine[i] = sums[block * kIndexKeys + i][v];
            weigh<spread>(work, vector + v, key + block * kIndexKeys, mine);
        }
}

// Up to three vectors of heads with all keys of a page; their words stay in the first-level cache.
template <bool half, int spread, int vectors, int blocks = 1>
ESS_LANE void index_vectors(const IndexWork& work, const uint32_t* keys, int64_t vector,
                            const NextPage& next) {
    constexpr int64_t step = blocks * kIndexKeys;
    for (int64_t key = 0; key < kPageKeys; key += step) {
        const NextPage part = next.part(key / step, kPageKeys / step);
        if (work.words == kUsualWords)
            index_block<half, spread, vectors, blocks, kUsualWords>(work, keys, key, vector, part);
        else
            index_block<half, spread, vectors, blocks, 0>(work, keys, key, vector, part);
    }
}

#if ESS_TILES
// One or two vectors of heads with all keys of a page.
template <int vectors>
ESS_LANE void tile_vectors(const IndexWork& work, const uint32_t* keys, int64_t vector,
                           const NextPage& next) {
    constexpr int64_t count = 2 * kTileRows;
    alignas(64) float products[vectors][count][kLanes];
    for (int64_t key = 0; key < kPageKeys; key += count) {
        multiply_tiles<2, vectors>(keys + key * work.words, work.words,
                                   work.packed + vector * work.panel, work.panel, work.steps,
                                   products[0][0], next.part(key / count, kPageKeys / count));
        for (int v = 0; v < vectors; v++)
            for (int64_t i = 0; i < count; i += kIndexKeys) {
                Floats sums[kIndexKeys];
                for (int64_t j = 0; j < kIndexKeys; j++)
                    sums[j] = load<Floats>(products[v][i + j]);
                weigh<1>(work, vector + v, key + i, sums);
            }
    }
}

ESS_LANE void tile_page(const IndexWork& work, const uint32_t* keys, int64_t vectors,
                        NextPage next) {
    int64_t vector = 0;
    for (; vector + 2 <= vectors; vector += 2, next.lines = 0)
        tile_vectors<2>(work, keys, vector, next);
    if (vector < vectors) tile_vectors<1>(work, keys, vector, next);
}
#endif

template <bool half, int spread>
ESS_LANE void index_page(const IndexWork& work, const uint32_t* keys, int64_t vectors,
                         NextPage next) {
#if ESS_TILES
    return tile_page(work, keys, vectors, next);
#else
    for (int64_t vector = 0; vector < vectors; vector += kIndexVectors, next.lines = 0)
        switch (vectors - vector) {
            case 1: index_vectors<half, spread, 1, 2>(work, keys, vector, next); break;
            case 2: index_vectors<half, spread, 2>(work, keys, vector, next); break;
            default: index_vectors<half, spread, kIndexVectors>(work, keys, vector, next);
        }
#endif
}

// Those of a page's logits that lie within the length of their query.
ESS_LANE void give_out(const Index& call, const Run& run, const IndexWork& work, int64_t page,
                       const float_any* scales, float* logits, int64_t stride) {
    for (int64_t query = 0; query < run.count; query++) {
        const int64_t rest = call.lengths[run.first + query] - page * kPageKeys;
        const int64_t count = rest < kPageKeys ? rest : kPageKeys;
        const float* from = work.logits + query * kPageKeys;
        float* to = logits + query * stride + page * kPageKeys;
        for (int64_t i = 0; i < count; i++) to[i] = scales ? from[i] * scales[i] : from[i];
    }
}

template <bool half, int spread>
void index_spread(const Index& call, const Run& run, const IndexWork& work, int64_t first,
                  int64_t last, float* logits, int64_t stride) {
    const int32_t* table = call.table + run.longest * call.table_stride;
    const bool is_fp8 = call.key_form == Form::fp8;
    const int64_t page_bytes = kPageKeys * (is_fp8 ? call.key_dim + 4 : 4 * call.key_dim);
    for (int64_t page = first; page < last; page++) {
        const uint8_t* from = call.pages.base + table[page] * call.pages.stride;
        const int64_t after = table[page + 1 < last ? page + 1 : page];
        const NextPage next{call.pages.base + after * call.pages.stride,
                            page + 1 < last ? page_bytes / 64 : 0};
        const uint32_t* keys = page_words<half>(call, from, work.keys);
        index_page<half, spread>(work, keys, run.count * work.per_query, next);
        const uint8_t* scales = is_fp8 ? from + kPageKeys * call.key_dim : nullptr;
        give_out(call, run, work, page, (const float_any*)scales, logits, stride);
    }
}

#if ESS_TILES
void index(const Index& call, const Run& run, int64_t first, int64_t last, float* logits,
           int64_t stride) {
    const IndexWork work(call, run.count, true);
    const Tiles tiles;
    pack_run<true>(call, run, work);
    index_spread<true, 1>(call, run, work, first, last, logits, stride);
}
#else
template <bool half>
void index_in(const Index& call, const Run& run, int64_t first, int64_t last, float* logits,
              int64_t stride) {
    const IndexWork work(call, run.count, half);
    pack_run<half>(call, run, work);
    if (work.spread == 4)
        index_spread<half, kLanes >= 8 ? 4 : 1>(call, run, work, first, last, logits, stride);
    else if (work.spread == 2)
        index_spread<half, kLanes >= 8 ? 2 : 1>(call, run, work, first, last, logits, stride);
    else
        index_spread<half, 1>(call, run, work, first, last, logits, stride);
}

void index(const Index& call, const Run& run, int64_t first, int64_t last, float* logits,
           int64_t stride) {
#if ESS_HALF
    if (is_half(call) && in_tiles(call.key_dim / 2))
        return index_in_tiles(call, run, first, last, logits, stride);
    if (is_half(call)) return index_in<true>(call, run, first, last, logits, stride);
#endif
    index_in<false>(call, run, first, last, logits, stride);
}
#endif
