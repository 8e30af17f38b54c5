// Products of a few tokens with packed weights.
//
// Weights are packed: panels of kLanes outputs, each [word of the input, output], zeros behind the
// last. A word is a float or a pair of bf16; with pairs the input is rounded to bf16 first. Where
// there are tiles, they take pairs whose sums are whole tiles long, for one token as for many: a
// token's bits are the same in any company. With ESS_TILES this file is that part.
#pragma once

template <bool half, int rows, int vectors>
ESS_LANE void panel_block(const uint32_t* left, int64_t stride, const uint32_t* right,
                          int64_t panel, int64_t steps, Floats (&sums)[rows][vectors]) {
    for (int64_t step = 0; step < steps; step++, left++, right += kLanes) {
        Ints columns[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) columns[v] = load<Ints>(right + v * panel);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const Ints word = repeat<1>(left + row * stride);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[row][v] = dot<half>(sums[row][v], word, columns[v]);
        }
    }
}

// A vector of a token's sums, cut off behind the last output.
ESS_LANE void store_sums(const Product& p, Floats sums, int64_t token, int64_t column) {
    sums *= p.factor;
    float* to = p.out + token * p.stride + column;
    const int64_t room = p.out_dim - column;
    if (room >= kLanes)
        store(to, sums);
    else
        __builtin_memcpy(to, &sums, room * 4);
}

#if ESS_TILES
// Up to two tiles of tokens with one or two panels, or one tile with four.
template <int tiles, int vectors>
ESS_LANE void tile_block(const Product& p, int64_t token, int64_t count, int64_t column) {
    alignas(64) float sums[vectors][tiles * kTileRows][kLanes];
    multiply_tiles<tiles, vectors>(p.words + token * p.steps, p.steps, p.panels + column * p.steps,
                                   p.steps * kLanes, p.steps, sums[0][0]);
    for (int v = 0; v < vectors; v++)
        for (int64_t i = 0; i < count; i++)
            store_sums(p, load<Floats>(sums[v][i]), token + i, column + v * kLanes);
}

template <int vectors>
ESS_LANE void tile_columns(const Product& p, int64_t tokens, int64_t column) {
    for (int64_t token = 0; token < tokens; token += 2 * kTileRows) {
        const int64_t rest = tokens - token;
        if (rest > kTileRows)
            tile_block<2, vectors>(p, token, rest < 2 * kTileRows ? rest : 2 * kTileRows, column);
        else
            tile_block<1, vectors>(p, token, rest, column);
    }
}

void product(const Product& p, int64_t tokens) {
    const Tiles tiles(tokens < kTileRows ? tokens : kTileRows);
    int64_t column = 0;
    for (; tokens <= kTileRows && column + 3 * kLanes < p.out_dim; column += 4 * kLanes)
        tile_block<1, 4>(p, 0, tokens, column);
    for (; column + kLanes < p.out_dim; column += 2 * kLanes) tile_columns<2>(p, tokens, column);
    if (column < p.out_dim) tile_columns<1>(p, tokens, column);
}
#else
template <int rows, int vectors>
ESS_LANE void store_block(const Product& p, const Floats (&sums)[rows][vectors], int64_t token,
                          int64_t column) {
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            store_sums(p, sums[row][v], token + row, column + v * kLanes);
}

template <bool half, int rows, int vectors>
ESS_LANE void product_block(const Product& p, int64_t token, int64_t column) {
    Floats sums[rows][vectors] = {};
    panel_block<half>(p.words + token * p.steps, p.steps, p.panels + column * p.steps,
                      p.steps * kLanes, p.steps, sums);
    store_block(p, sums, token, column);
}

// Whether sums of six tokens and what they take fit into registers: 24 of 32 vectors, 12 of 16.
template <int vectors>
constexpr bool kSixTokens = kLanes == 16 || (kLanes == 8 && vectors <= 2);

// All tokens over one to four panels, which stay near while the tokens pass.
template <bool half, int vectors>
ESS_LANE void product_columns(const Product& p, int64_t tokens, int64_t column) {
    int64_t token = 0;
    if constexpr (kSixTokens<vectors>)
        for (; token + 6 <= tokens; token += 6) product_block<half, 6, vectors>(p, token, column);
    for (; token + 4 <= tokens; token += 4) product_block<half, 4, vectors>(p, token, column);
    if (token + 2 <= tokens) product_block<half, 2, vectors>(p, token, column), token += 2;
    if (token < tokens) product_block<half, 1, vectors>(p, token, column);
}

template <bool half>
void product_in(const Product& p, int64_t tokens) {
    int64_t column = 0;
    const bool is_narrow = kLanes == 8 && tokens >= 6;
    for (; !is_narrow && column + 3 * kLanes < p.out_dim; column += 4 * kLanes)
        product_columns<half, 4>(p, tokens, column);
    for (; is_narrow && column + kLanes < p.out_dim; column += 2 * kLanes)
        product_columns<half, 2>(p, tokens, column);
    for (; column < p.out_dim; column += kLanes) product_columns<half, 1>(p, tokens, column);
}

void product(const Product& p, int64_t tokens, [[maybe_unused]] bool half) {
#if ESS_HALF
    if (half && in_tiles(p.steps)) return product_in_tiles(p, tokens);
    if (half) return product_in<true>(p, tokens);
#endif
    product_in<false>(p, tokens);
}

ESS_LANE int64_t word_count(int64_t dim, bool half) { return half ? (dim + 1) / 2 : dim; }

// As bf16_round, vector by vector: compilers do not see that the two sides lie apart.
ESS_LANE void round_values(const float* from, int64_t dim, half_any* to) {
    typedef uint32_t Words __attribute__((vector_size(4 * ESS_LANES)));
    typedef uint16_t Halves __attribute__((vector_size(2 * ESS_LANES)));
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
        const Words bits = load<Words>(from + i);
        const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        const auto is_nan = (bits & 0x7FFFFFFFu) > inf_bits;
        const Words kept = is_nan ? Words{} + 0x7FC0u : rounded;
        store(to + i, __builtin_convertvector(kept, Halves));
    }
    for (; i < dim; i++) to[i] = bf16_round(from[i]);
}

ESS_LANE void to_words(const float* from, int64_t dim, bool half, uint32_t* to) {
    if (!half) {
        __builtin_memcpy(to, from, dim * 4);
        return;
    }
    round_values(from, dim, (half_any*)to);
    if (dim & 1) ((half_any*)to)[dim] = 0;
}
#endif
