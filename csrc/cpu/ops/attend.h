// Sparse attention over encoded rows, one query and a range of its heads at a time.
//
// Slots that name a row are taken in the order of the list, kTile at a time, whatever pads lie
// between them: so the blocks of the sums follow from the rows and their order alone, and the same
// rows give the same bits wherever they lie, whichever matrix holds them, and whichever queries are
// computed beside them. A head is a lane throughout: no sum crosses heads, and a block of heads is
// as good as all.
//
// Per tile: decode the rows, multiply with the query (requesting the next rows from memory
// meanwhile), rescale what is there to the new greatest logit, multiply with the values. Rows that
// lie in memory as the products need them are read in place.
//
// Products are taken in bf16 only where both sides are: the query is bf16 and the rows are fp8 or
// bf16. Weights are rounded to bf16 there as well. Everything else is float32 with fused
// multiply-add. Sums are float32.
//
// Weights are powers of two: logits are counted in bits, and in bf16 what is taken off all of them
// is the greatest of them rounded up to a whole number. So another choice of what to take off,
// which comes with other tiles or with rows split between two partials, scales the weights by a
// power of two, and they round to the same bf16. Without this, a split would change every weight by
// up to half a unit of bf16; with it, a split changes the order of float32 sums alone. The sum that
// outputs are divided by, and lse with it, is of weights as rounded: so one key gives its value,
// and a merge divides by what one pass would have divided by.
//
// NaN: a comparison that NaN loses keeps it out of the greatest logit but not out of the weights,
// so a broken row that is named breaks out and lse of its query, and only those. Rows to spare hold
// what was there before, and products by vectors never take their weights. Tile registers multiply
// those up to the next 32 by weights of zero: there they must be zeros.
//
// With ESS_TILES this file is the part that tile registers take: products of bf16 whose rows are
// whole tiles of words long, with more heads than one block; fewer leave too much of a tile empty.
#pragma once

#if !ESS_TILES
#if ESS_HALF
// sums += weights of a block of heads times the values of rows that are not paired yet.
ESS_LANE void multiply_pairs(Factor weights, const uint8_t* const* rows, int64_t column,
                             int64_t steps, Floats (&sums)[kHeads][kVectors]) {
    for (int64_t step = 0; step < steps; step++) {
        const auto* even = (const uint32_t*)rows[2 * step] + column;
        const auto* odd = (const uint32_t*)rows[2 * step + 1] + column;
        Ints columns[kVectors];
        for (int v = 0; v < kVectors; v += 2)
            pair_columns(even + v * kLanes / 2, odd + v * kLanes / 2, columns + v);
        for (int64_t i = 0; i < kHeads; i++) {
            const Ints word = repeat<1>(weights.from + i * weights.stride);
            for (int v = 0; v < kVectors; v++)
                sums[i][v] = dot<true>(sums[i][v], word, columns[v]);
        }
        weights.from += weights.next;
    }
}
#endif

// sums[row][column] += rows times columns of `right`, as `multiply` does for rows that lie apart.
template <bool half, int spread, int rows, int vectors, typename Later>
ESS_LANE void multiply_rows(const uint8_t* const* left, const uint32_t* right,
                            int64_t right_stride, int64_t steps, Floats (&sums)[rows][vectors],
                            const Later& later) {
    const uint32_t* from[rows];
    for (int row = 0; row < rows; row++) from[row] = (const uint32_t*)left[row];
    for (int64_t step = 0; step < steps; step++, right += right_stride) {
        later.request(step);
        Ints columns[vectors];
        for (int v = 0; v < vectors; v++) columns[v] = load<Ints>(right + v * kLanes);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const Ints word = repeat<spread>(from[row] + step * spread);
            for (int v = 0; v < vectors; v++)
                sums[row][v] = dot<half>(sums[row][v], word, columns[v]);
        }
    }
    for (int64_t step = steps; later.wants(step); step++) later.request(step);
}

template <bool half, int spread, int vectors, typename Later>
ESS_LANE void logits_block(const Work<half>& work, const uint8_t* const* tile, float scale,
                           int64_t key, int64_t lane, const Later& later) {
    Floats sums[kKeys][vectors] = {};
    multiply_rows<half, spread>(tile + key, work.packed + lane, work.query.width,
                                work.query.steps(), sums, later);
    for (int64_t i = 0; i < kKeys; i++)
        for (int v = 0; v < vectors; v++)
            store(work.logits + (key + i) * work.query.width + lane + v * kLanes,
                  fold<spread>(sums[i][v]) * scale);
}

// The logits of a decoded tile for one vector of heads. Twice as many sums are under way, and rows
// lie so far apart as the compiler knows: it need not keep an address for each.
template <bool half, int spread>
ESS_LANE void logits_usual(const Work<half>& work, float scale, int64_t count,
                           const NextTile& next) {
    constexpr int64_t keys = 2 * kKeys;
    for (int64_t key = 0; key < count; key += keys) {
        Floats sums[keys][1] = {};
        multiply<half, spread>({work.rows + key * kUsualRow, kUsualRow, spread}, work.packed,
                               kLanes, work.query.steps(), sums,
                               NextTwice{next.behind(key), next.behind(key + kKeys)});
        for (int64_t i = 0; i < keys; i++)
            store(work.logits + (key + i) * kLanes, fold<spread>(sums[i][0]) * scale);
    }
}

template <bool half, int spread, int vectors>
ESS_LANE void logits_tile(const Work<half>& work, const uint8_t* const* tile, float scale,
                          int64_t count, const NextTile& next) {
    if (kLanes == 16 && vectors == 1 && tile == work.decoded && work.row_words == kUsualRow)
        return logits_usual<half, spread>(work, scale, count, next);
    for (int64_t key = 0; key < count; key += kKeys)
        logits_block<half, spread, vectors>(work, tile, scale, key, 0, next.behind(key));
    constexpr int64_t width = vectors * kLanes;
    int64_t lane = width;
    for (; lane + width <= work.query.width; lane += width)
        for (int64_t key = 0; key < count; key += kKeys)
            logits_block<half, spread, vectors>(work, tile, scale, key, lane, Nothing{});
    if (lane < work.query.width)
        for (int64_t key = 0; key < count; key += kKeys)
            logits_block<half, spread, 1>(work, tile, scale, key, lane, Nothing{});
}

template <bool half>
ESS_LANE void add_values([[maybe_unused]] const Work<half>& work, const uint8_t* const* tile,
                         Factor weights, int64_t column, int64_t steps,
                         Floats (&sums)[kHeads][kVectors]) {
#if ESS_HALF
    if constexpr (half) {
        if (!work.pairs_ahead()) return multiply_pairs(weights, tile, column / 2, steps, sums);
        return multiply<half, 1>(weights, work.values + column, work.columns, steps, sums);
    }
#endif
    for (int64_t step = 0; step < steps; step++, weights.from += weights.next) {
        Ints columns[kVectors];
        const uint8_t* from = tile[step] + 4 * column;
        for (int v = 0; v < kVectors; v++) columns[v] = load<Ints>(from + 4 * v * kLanes);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kHeads; i++) {
            const Ints word = repeat<1>(weights.from + i * weights.stride);
            for (int v = 0; v < kVectors; v++)
                sums[i][v] = dot<half>(sums[i][v], word, columns[v]);
        }
    }
}

template <bool half>
ESS_LANE void values_tile(const Work<half>& work, const uint8_t* const* tile, int64_t count,
                          bool is_first) {
    const int64_t steps = half ? (count + 1) / 2 : count, spread = work.query.spread;
    float* out = work.out;
    for (int64_t column = 0; column < work.columns; column += kColumns)
        for (int64_t head = 0; head < work.head_rows; head += kHeads, out += kHeads * kColumns) {
            Floats sums[kHeads][kVectors];
            for (int64_t i = 0; i < kHeads; i++)
                for (int64_t v = 0; v < kVectors; v++)
                    sums[i][v] = is_first ? Floats{}
                                          : load<Floats>(out + i * kColumns + v * kLanes) *
                                                work.fade[(head + i) * spread];
            const Factor weights{work.weights + head * spread, spread, work.query.width};
            add_values<half>(work, tile, weights, column, steps, sums);
            for (int64_t i = 0; i < kHeads; i++)
                for (int64_t v = 0; v < kVectors; v++)
                    store(out + i * kColumns + v * kLanes, sums[i][v]);
        }
}
#endif

#if ESS_HALF
// Two vectors of weights become one of words, even weight first.
ESS_LANE Ints pair(Floats even, Floats odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
    return (Ints)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#endif

// Logits of a vector of heads become weights; returns `sum` plus what they are once rounded.
template <bool half>
ESS_LANE Floats weights_tile(const Work<half>& work, int64_t lane, int64_t count, Floats top,
                             Floats sum) {
    const int64_t width = work.query.width;
    float* logits = work.logits + lane;
#if ESS_HALF
    if constexpr (half) {
        for (int64_t i = 0; i < count; i += 2, logits += 2 * width) {
            const Floats even = power_of_two(load<Floats>(logits) - top);
            const Floats odd =
                i + 1 < count ? power_of_two(load<Floats>(logits + width) - top) : Floats{};
            const Ints word = pair(even, odd);
            store(work.weights + i / 2 * width + lane, word);
            sum += (Floats)(word << 16);
            sum += (Floats)(word & int32_t(0xFFFF0000));
        }
        return sum;
    }
#endif
    for (int64_t i = 0; i < count; i++) {
        const Floats weight = power_of_two(load<Floats>(logits + i * width) - top);
        store(logits + i * width, weight);
        sum += weight;
    }
    return sum;
}

template <bool half>
ESS_LANE void softmax_tile(const Work<half>& work, int64_t count) {
    const int64_t width = work.query.width;
    for (int64_t lane = 0; lane < width; lane += kLanes) {
        float* logits = work.logits + lane;
        const Floats before = load<Floats>(work.greatest + lane);
        Floats top = before;
        for (int64_t i = 0; i < count; i++) {
            const Floats logit = load<Floats>(logits + i * width);
            top = logit > top ? logit : top;
        }
        if constexpr (half) top = whole_from(top);
        const Floats fade = power_of_two(before - top);
        const Floats sum = load<Floats>(work.sum + lane) * fade;
        store(work.greatest + lane, top);
        store(work.fade + lane, fade);
        store(work.sum + lane, weights_tile<half>(work, lane, count, top, sum));
    }
}

template <bool half>
ESS_LANE void finish(const Attend& call, const Work<half>& work, int64_t query, int64_t head,
                     int64_t lane, bool is_empty) {
    const int64_t at = query * call.head_count + head;
    float* out = call.out + at * call.latent_dim;
    if (is_empty) {
        call.lse[at] = -__builtin_inff();
        __builtin_memset(out, 0, call.latent_dim * 4);
        return;
    }
    const float sum = work.sum[lane * work.query.spread];
    call.lse[at] = float((work.greatest[lane * work.query.spread] + ::log2(double(sum))) * kLog2);
    for (int64_t column = 0; column < call.latent_dim; column += kColumns) {
        const float* from = work.out + column * work.head_rows + lane * kColumns;
        const int64_t rest = call.latent_dim - column;
        for (int64_t i = 0; i < (rest < kColumns ? rest : kColumns); i++)
            out[column + i] = from[i] / sum;
    }
}

template <bool half, int spread>
void attend_spread(const Attend& call, const Work<half>& work, bool is_plain,
                   int64_t named_count) {
    for (int64_t lane = 0; lane < work.query.width; lane++) {
        work.greatest[lane] = kLowest;
        work.sum[lane] = 0;
    }
    const int64_t lines = line_count(call);
    const float scale = float(call.scale / kLog2);
    for (int64_t first = 0; first < named_count; first += kTile) {
        const int64_t rest = named_count - first, count = rest < kTile ? rest : kTile;
        const NextTile next{work.named + first + kTile, rest - kTile, lines};
        [[maybe_unused]] const uint8_t* const* tile =
            decode_tile<half>(call, work, is_plain, first, count);
#if ESS_TILES
        logits_in_tiles(work, scale, count, next);
        softmax_tile<half>(work, count);
        values_in_tiles(work, count, first == 0);
#else
        if (work.query.width == kLanes)
            logits_tile<half, spread, 1>(work, tile, scale, count, next);
        else
            logits_tile<half, spread, 2>(work, tile, scale, count, next);
        softmax_tile<half>(work, count);
        values_tile<half>(work, tile, count, first == 0);
#endif
    }
}

// Whether the products can read rows as they are stored; tile registers read them side by side.
template <bool half>
ESS_LANE bool are_plain(const Attend& call) {
    if (ESS_TILES) return false;
    return call.row_form == (half ? Form::bf16 : Form::f32) && call.latent_dim % kColumns == 0;
}

template <bool half>
void attend_in(const Attend& call, int64_t query, int64_t first_head, int64_t last_head) {
    const Work<half> work(call, last_head - first_head);
    const int64_t named_count = find_named(call, query, work.named);
    const bool is_plain = are_plain<half>(call);
    for (int64_t i = 0; is_plain && i < kTile; i++) work.named[named_count + i] = work.zeros;
    for (int64_t i = 0; i < named_count && i < kTile; i++)
        for (int64_t line = 0; line < line_count(call); line++)
            __builtin_prefetch(work.named[i] + 64 * line, 0, 2);
    pack<half>(work.query, call.queries + query * call.query_stride + first_head * call.head_stride,
               call.query_form, call.head_stride, work.packed);
    const int64_t spread = ESS_TILES ? 1 : work.query.spread;
    if (spread == 4)
        attend_spread<half, 4>(call, work, is_plain, named_count);
    else if (spread == 2)
        attend_spread<half, 2>(call, work, is_plain, named_count);
    else
        attend_spread<half, 1>(call, work, is_plain, named_count);
    for (int64_t head = first_head; head < last_head; head++)
        finish<half>(call, work, query, head, head - first_head, named_count == 0);
}

void attend(const Attend& call, int64_t query, int64_t first_head, int64_t last_head) {
#if ESS_TILES
    const Tiles tiles;
    attend_in<true>(call, query, first_head, last_head);
#else
#if ESS_HALF
    const bool is_half = call.row_form != Form::f32 && call.query_form == Form::bf16;
    if (is_half && call.head_count > kHeads && in_tiles((call.latent_dim + call.rope_dim) / 2))
        return attend_in_tiles(call, query, first_head, last_head);
    if (is_half) return attend_in<true>(call, query, first_head, last_head);
#endif
    attend_in<false>(call, query, first_head, last_head);
#endif
}
