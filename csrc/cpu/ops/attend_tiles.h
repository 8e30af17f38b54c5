// The products of attention by tile registers.
//
// Logits: rows of keys by columns of heads, as those of an index. Values: rows of heads by columns
// of values, over two keys to a word; keys are counted in whole tiles of them, and those that are
// not there are zeros that weigh nothing. A row of a product depends on no other row: a head's bits
// depend on its own query and on the keys alone.
#pragma once

constexpr int64_t kTileKeys = 2 * kTileRows;  // of a tile of rows with logits, of words of values

// Rows of the next tile, so many at each step that none are left behind the last step.
struct NextRows {
    const uint8_t* const* rows;
    int64_t count, lines;

    NextRows part(int64_t at, int64_t parts) const {
        const int64_t share = (kTileKeys + parts - 1) / parts, first = at * share;
        const int64_t last = first + share < count ? first + share : count;
        return {rows + first, last - first, lines};
    }
    __attribute__((always_inline)) void request(int64_t line) const {
        for (int64_t row = 0; row < count; row++) __builtin_prefetch(rows[row] + 64 * line, 0, 2);
    }
    bool wants(int64_t line) const { return line < lines && count > 0; }
};

template <int vectors, typename Later>
ESS_LANE void tile_logits(const Work<true>& work, float scale, int64_t key, int64_t lane,
                          const Later& later) {
    alignas(64) float sums[vectors][kTileKeys][kLanes];
    multiply_tiles<2, vectors>(work.rows + key * work.row_words, work.row_words,
                               work.packed + lane, kLanes, work.query.words, sums[0][0], later,
                               work.query.width);
    float* to = work.logits + key * work.query.width + lane;
    for (int64_t i = 0; i < kTileKeys; i++, to += work.query.width)
        for (int v = 0; v < vectors; v++)
            store(to + v * kLanes, load<Floats>(sums[v][i]) * scale);
}

ESS_LANE void logits_in_tiles(const Work<true>& work, float scale, int64_t count,
                              const NextTile& next) {
    const int64_t pairs = work.query.width / kLanes / 2 * 2 * kLanes;
    for (int64_t key = 0; key < count; key += kTileKeys) {
        const int64_t rest = next.count - key;
        NextRows rows{next.rows + key, rest < kTileKeys ? rest : kTileKeys, next.lines};
        for (int64_t lane = 0; lane < pairs; lane += 2 * kLanes, rows.count = 0)
            tile_logits<2>(work, scale, key, lane, rows);
        if (pairs < work.query.width) tile_logits<1>(work, scale, key, pairs, rows);
    }
}

// The weights of a tile by head: [vector of heads, tile of pairs, head, pair].
ESS_LANE void turn_weights(const Work<true>& work, int64_t pairs) {
    const Ints order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints places = order * int32_t(work.query.width);
    for (int64_t lane = 0; lane < work.query.width; lane++) {
        const int64_t head = lane % kLanes;
        uint32_t* to = work.turned + (lane - head) * kTile / 2 + head * kTileWords;
        for (int64_t pair = 0; pair < pairs; pair += kTileWords, to += kTileRows * kTileWords) {
            const uint32_t* from = work.weights + pair * work.query.width + lane;
            store(to, _mm512_i32gather_epi32((__m512i)places, from, 4));
        }
    }
}

// What is there, rescaled; mostly nothing changes.
ESS_LANE void fade_sums(const Work<true>& work) {
    for (int64_t head = 0; head < work.head_rows; head++) {
        const float fade = work.fade[head];
        if (fade == 1.0f) continue;
        float* out = work.out + head * kColumns;
        for (int64_t column = 0; column < work.columns; column += kColumns)
            for (int64_t v = 0; v < kColumns; v += kLanes) {
                float* at = out + column * work.head_rows + v;
                store(at, load<Floats>(at) * fade);
            }
    }
}

// Adds what a vector of heads takes from two vectors of values.
ESS_LANE void add_in_tiles(const uint32_t* weights, const uint32_t* values, int64_t pairs,
                           float* out) {
    constexpr int64_t tile = kTileRows * kTileWords, panel = kTile / 2 * kLanes;
    settle_memory(weights);
    _tile_loadd(0, out, 4 * kColumns);
    _tile_loadd(1, out + kLanes, 4 * kColumns);
    for (int64_t pair = 0; pair < pairs; pair += kTileWords, weights += tile, values += tile) {
        _tile_loadd(4, weights, 4 * kTileWords);
        _tile_loadd(6, values, 4 * kLanes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + panel, 4 * kLanes);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, 4 * kColumns);
    _tile_stored(1, out + kLanes, 4 * kColumns);
    settle_memory(out);
}

ESS_LANE void values_in_tiles(const Work<true>& work, int64_t count, bool is_first) {
    constexpr int64_t step = 2 * kLanes;
    const int64_t pairs = round_up(count, kTileKeys) / 2, known = (count + 1) / 2;
    __builtin_memset(work.weights + known * work.query.width, 0,
                     (pairs - known) * work.query.width * 4);
    turn_weights(work, pairs);
    if (is_first)
        __builtin_memset(work.out, 0, work.head_rows * work.columns * 4);
    else
        fade_sums(work);
    for (int64_t column = 0; column < work.columns; column += step) {
        alignas(64) uint32_t values[2][kTile / 2][kLanes];
        for (int64_t pair = 0; pair < pairs; pair++) {
            const uint32_t* row = work.rows + 2 * pair * work.row_words + column / 2;
            Ints both[2];
            pair_columns(row, row + work.row_words, both);
            for (int v = 0; v < 2; v++) store(values[v][pair], both[v]);
        }
        float* out = work.out + column / kColumns * kColumns * work.head_rows + column % kColumns;
        for (int64_t lane = 0; lane < work.query.width; lane += kLanes, out += kLanes * kColumns)
            add_in_tiles(work.turned + lane * kTile / 2, values[0][0], pairs, out);
    }
}
