// What attention works in, and rows as its products read them.
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
    uint32_t* turned;   // by tiles: weights as [vector of heads, tile of pairs, head, pair]
    float* greatest;
    float* sum;
    float* fade;
    float* out;  // [block of columns, head, kColumns]

    Work(const Attend& call, int64_t heads)
        : query(heads, ESS_TILES ? kLanes : call.head_count,
                (call.latent_dim + call.rope_dim) / (half ? 2 : 1)),
          head_rows(round_up(heads, ESS_TILES ? kLanes : kHeads)),
          columns(round_up(call.latent_dim, kColumns)),
          row_words(round_up(
              query.words > columns / (half ? 2 : 1) ? query.words : columns / (half ? 2 : 1),
              16)) {
        const uintptr_t bytes = carve(0, call.slot_count);
        carve((uintptr_t)scratch(Use::attend, int64_t(bytes)), call.slot_count);
        for (int64_t i = 0; i < kTile; i++) decoded[i] = (const uint8_t*)(rows + i * row_words);
        __builtin_memset(zeros, 0, row_words * 4);
    }

    // One block of heads makes the pairs as it needs them; more blocks share what is stored.
    bool pairs_ahead() const { return half && !ESS_TILES && head_rows > kHeads; }

private:
    // Lays the arrays out from `at` on; returns where they end.
    uintptr_t carve(uintptr_t at, int64_t slot_count) {
        lay(at, named, slot_count + kTile);
        lay(at, decoded, kTile);
        lay(at, zeros, row_words * 4);
        lay(at, packed, query.word_count());
        lay(at, rows, kTile * row_words);
        lay(at, values, half && !ESS_TILES ? kTile / 2 * columns : 0);
        lay(at, logits, kTile * query.width);
        lay(at, weights, half ? kTile / 2 * query.width : 0);
        lay(at, turned, ESS_TILES ? kTile / 2 * query.width : 0);
        lay(at, greatest, query.width);
        lay(at, sum, query.width);
        lay(at, fade, query.width);
        lay(at, out, head_rows * columns);
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
#endif

// The rows of a tile as the products read them. An odd one is paired with zeros; tile registers
// read zeros up to the end of the last.
template <bool half>
ESS_LANE const uint8_t* const* decode_tile(const Attend& call, const Work<half>& work,
                                           bool is_plain, int64_t first, int64_t count) {
    const uint8_t* const* tile = is_plain ? work.named + first : work.decoded;
    for (int64_t i = 0; i < count && !is_plain; i++)
        decode_row<half>(call, work.named[first + i], (char*)(work.rows + i * work.row_words));
#if ESS_HALF
    if constexpr (half) {
        const int64_t whole = round_up(count, ESS_TILES ? 2 * kTileRows : 2);
        if (!is_plain)
            __builtin_memset(work.rows + count * work.row_words, 0,
                             (whole - count) * work.row_words * 4);
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
