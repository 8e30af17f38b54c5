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
// so a broken row that is named breaks out and lse of its query, and only those. Where tiles have
// rows to spare they hold what was there before; their weights are never used.
#pragma once

constexpr int64_t kTile = 64;
constexpr int64_t kKeys = 8;  // block of the first product: keys by vectors of heads
constexpr int64_t kHeads = kHeadBlock;  // block of the second: heads by vectors of values
constexpr int64_t kVectors = 4;
constexpr int64_t kColumns = kVectors * kLanes;
constexpr int64_t kUsualRow = 288;  // words of a decoded row of 512 + 64 values in bf16
constexpr float kLowest = -3.402823466e38f;
constexpr double kLog2 = 0.69314718055994530942;  // the natural logarithm of 2

// What one piece works in; all of it in this thread's scratch.
template <bool half>
struct Work {
    const Packing query;
    const int64_t head_rows;  // heads in whole blocks
    const int64_t columns;    // values in whole blocks
    const int64_t row_words;  // of a decoded row
    const uint8_t** named;    // rows as they are stored, then zeros where they are read in place
    const uint8_t** decoded;  // the rows of a tile
    uint8_t* zeros;           // a row
    uint32_t* packed;
    uint32_t* rows;
    uint32_t* values;
    float* logits;  // [key, lane]
    uint32_t* weights;  // in words, [key or pair of keys, lane]; in float32 the same memory
    float* greatest;
    float* sum;
    float* fade;
    float* out;  // [block of columns, head, kColumns]

    Work(const Attend& call, int64_t heads)
        : query(heads, call.head_count, (call.latent_dim + call.rope_dim) / (half ? 2 : 1)),
          head_rows(round_up(heads, kHeads)), columns(round_up(call.latent_dim, kColumns)),
          row_words(round_up(
              query.words > columns / (half ? 2 : 1) ? query.words : columns / (half ? 2 : 1),
              16)) {
        const uintptr_t bytes = carve(0, call.slot_count);
        carve((uintptr_t)scratch(Use::attend, int64_t(bytes)), call.slot_count);
        for (int64_t i = 0; i < kTile; i++) decoded[i] = (const uint8_t*)(rows + i * row_words);
        __builtin_memset(zeros, 0, row_words * 4);
    }

    // One block of heads makes the pairs as it needs them; more blocks share what is stored.
    bool pairs_ahead() const { return half && head_rows > kHeads; }

private:
    template <typename T>
    static void take(uintptr_t& at, T*& array, int64_t count) {
        array = (T*)at;
        at += round_up(count * int64_t(sizeof(T)), 64);
    }

    // Lays the arrays out from `at` on; returns where they end.
    uintptr_t carve(uintptr_t at, int64_t slot_count) {
        take(at, named, slot_count + kTile);
        take(at, decoded, kTile);
        take(at, zeros, row_words * 4);
        take(at, packed, query.word_count());
        take(at, rows, kTile * row_words);
        take(at, values, half ? kTile / 2 * columns : 0);
        take(at, logits, kTile * query.width);
        take(at, weights, half ? kTile / 2 * query.width : 0);
        take(at, greatest, query.width);
        take(at, sum, query.width);
        take(at, fade, query.width);
        take(at, out, head_rows * columns);
        if constexpr (!half) weights = (uint32_t*)logits;
        return at;
    }
};

ESS_LANE int64_t find_named(const Attend& call, int64_t query, const uint8_t** named) {
    const int32_t* slots = call.slots + query * call.slot_stride;
    int64_t count = 0;
    for (int64_t i = 0; i < call.slot_count; i++) {
        const int64_t slot = slots[i];
        const Matrix& from = slot >= 0 ? call.rows : call.placed;
        named[count] = from.base + (slot >= 0 ? slot : -2 - slot) * from.stride;
        count += slot != -1;
    }
    return count;
}

// Values that are plain in the row, as bf16.
template <bool half>
ESS_LANE void decode_tail(const uint8_t* tail, int64_t count, char* to) {
    if constexpr (half)
        __builtin_memcpy(to, tail, count * 2);
    else
        for (int64_t i = 0; i < count; i++)
            ((float_any*)to)[i] = bf16_widen(((const half_any*)tail)[i]);
}

template <bool half>
ESS_LANE void decode_by_bytes(const Attend& call, const uint8_t* row, char* to) {
    const int64_t size = half ? 2 : 4, coded = call.latent_dim - call.plain_dim;
    const uint8_t *tail = row + coded, *scales = tail + 2 * call.plain_dim;
    for (int64_t at = 0; at < coded; at += kByteScaled)
        ESS_DECODE_GROUP<half>(row + at, byte_scale(*scales++), kByteScaled, to + at * size);
    decode_tail<half>(tail, call.plain_dim, to + coded * size);
}

template <bool half>
ESS_LANE void decode_row(const Attend& call, const uint8_t* row, char* to) {
    const int64_t size = half ? 2 : 4, dim = call.latent_dim + call.rope_dim;
    if (call.row_form == Form::fp8_64) return decode_by_bytes<half>(call, row, to);
    if (call.row_form == Form::f32 || (half && call.row_form == Form::bf16)) {
        __builtin_memcpy(to, row, dim * size);
        return;
    }
    const int64_t groups = call.row_form == Form::fp8 ? call.latent_dim / 128 : 0;
    const uint8_t* tail = row + groups * 132;
    ESS_DECODE_GROUPS<half>(row, (const float_any*)(row + groups * 128), groups, to);
    decode_tail<half>(tail, dim - groups * 128, to + groups * 128 * size);
}

#if ESS_HALF
// Two rows of bf16 become one row of words, each with both numbers of a column: two vectors of it.
ESS_LANE void pair_columns(const uint32_t* even, const uint32_t* odd, Ints* to) {
    const __m512i step = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004,
                                           0x250005, 0x260006, 0x270007, 0x280008, 0x290009,
                                           0x2A000A, 0x2B000B, 0x2C000C, 0x2D000D, 0x2E000E,
                                           0x2F000F);
    const __m512i later = _mm512_add_epi32(step, _mm512_set1_epi32(0x100010));
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    to[0] = (Ints)_mm512_permutex2var_epi16(a, step, b);
    to[1] = (Ints)_mm512_permutex2var_epi16(a, later, b);
}

ESS_LANE void pair_rows(const uint32_t* even, const uint32_t* odd, int64_t columns, uint32_t* to) {
    for (int64_t i = 0; i < columns; i += 2 * kLanes)
        pair_columns(even + i / 2, odd + i / 2, (Ints*)(to + i));
}

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

// Two vectors of weights become one of words, even weight first.
ESS_LANE Ints pair(Floats even, Floats odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
    return (Ints)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#endif

// The rows of a tile as the products read them. An odd one is paired with zeros.
template <bool half>
ESS_LANE const uint8_t* const* decode_tile(const Attend& call, const Work<half>& work,
                                           bool is_plain, int64_t first, int64_t count) {
    const uint8_t* const* tile = is_plain ? work.named + first : work.decoded;
    for (int64_t i = 0; i < count && !is_plain; i++)
        decode_row<half>(call, work.named[first + i], (char*)(work.rows + i * work.row_words));
#if ESS_HALF
    if constexpr (half) {
        if (!is_plain && count & 1)
            __builtin_memset(work.rows + count * work.row_words, 0, work.row_words * 4);
        if (!work.pairs_ahead()) return tile;
        for (int64_t i = 0; i < count; i += 2)
            pair_rows((const uint32_t*)tile[i], (const uint32_t*)tile[i + 1], work.columns,
                      work.values + i / 2 * work.columns);
    }
#endif
    return tile;
}

ESS_LANE int64_t line_count(const Attend& call) {
    const int64_t dim = call.latent_dim + call.rope_dim;
    const int64_t bytes = call.row_form == Form::fp8      ? dim + call.rope_dim + dim / 32
                          : call.row_form == Form::fp8_64 ? dim + call.plain_dim + dim / kByteScaled
                          : call.row_form == Form::bf16   ? 2 * dim
                                                          : 4 * dim;
    return bytes / 64 + 1;
}

// Some rows of the next tile, a line of one of them at a time, into the second-level cache: many
// requests at once would find its entries taken.
struct NextTile {
    const uint8_t* const* rows;
    int64_t count;
    int64_t lines;

    __attribute__((always_inline)) void request(int64_t step) const {
        const int64_t row = step % kKeys, line = step / kKeys;
        if (row < count && line < lines) __builtin_prefetch(rows[row] + 64 * line, 0, 2);
    }
    NextTile behind(int64_t row) const { return {rows + row, count - row, lines}; }
    bool wants(int64_t step) const { return step < kKeys * lines; }
};

// The same for a block of twice as many keys: two lines at a time.
struct NextTwice {
    NextTile first, second;

    __attribute__((always_inline)) void request(int64_t step) const {
        first.request(step);
        second.request(step);
    }
    bool wants(int64_t step) const { return first.wants(step); }
};

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
        const uint8_t* const* tile = decode_tile<half>(call, work, is_plain, first, count);
        if (work.query.width == kLanes)
            logits_tile<half, spread, 1>(work, tile, scale, count, next);
        else
            logits_tile<half, spread, 2>(work, tile, scale, count, next);
        softmax_tile<half>(work, count);
        values_tile<half>(work, tile, count, first == 0);
    }
}

// Whether the products can read rows as they are stored.
template <bool half>
ESS_LANE bool are_plain(const Attend& call) {
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
    if (work.query.spread == 4)
        attend_spread<half, 4>(call, work, is_plain, named_count);
    else if (work.query.spread == 2)
        attend_spread<half, 2>(call, work, is_plain, named_count);
    else
        attend_spread<half, 1>(call, work, is_plain, named_count);
    for (int64_t head = first_head; head < last_head; head++)
        finish<half>(call, work, query, head, head - first_head, named_count == 0);
}

void attend(const Attend& call, int64_t query, int64_t first_head, int64_t last_head) {
#if ESS_HALF
    if (call.row_form != Form::f32 && call.query_form == Form::bf16)
        return attend_in<true>(call, query, first_head, last_head);
#endif
    attend_in<false>(call, query, first_head, last_head);
}
