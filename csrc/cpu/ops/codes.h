// Products with weights that stay as integers: codes of 4 or 8 bits, and for 32 inputs of an output
// a scale and an offset in float16. A weight is code * scale + offset; that number is never made.
//
//     output = sum over groups of  scale * (sum of code * input) + offset * (sum of inputs)
//
// The inner sum is made of products as everywhere else, of floats or of pairs of bf16; codes are
// exact in both. It grows word by word in a lane of its own, and groups are added in their order,
// so the bits depend on nothing but the input, whatever the number of tokens. Where many tokens
// pass, codes are first written out as words, which is done once for all of them: the same words in
// the same order. Where there are tiles, they take the inner sums of pairs (a group is as long as a
// tile); few tokens get the same bits without them. With ESS_TILES this file is that part.
//
// Packed: panels of kLanes outputs, each [group, bits + 1, output]. The last vector of a group
// holds scale (low half) and offset (high half); the others hold codes. The low half of a word
// holds those of even inputs, the high half those of odd ones, lowest first: shifted by `bits` it
// shows the next pair.
#pragma once

constexpr int64_t kGroupInputs = 32;
constexpr int64_t kWriteOutFrom = 8;  // tokens: from here on codes are written out, without tiles
constexpr int64_t kPanelsTogether = 4;

constexpr int64_t group_words(int bits) { return (bits + 1) * kLanes; }

// A float16 that is finite, in the low half of each lane. What is subnormal there is exact too,
// with ESS_TILES also in a thread that takes subnormal numbers as zeros.
ESS_LANE Floats widen_float16(Ints number) {
#if ESS_TILES
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)number));
#else
    const Floats magnitude = (Floats)((number & 0x7FFF) << 13) * 0x1p112f;
    return (Floats)((Ints)magnitude | (number & 0x8000) << 16);
#endif
}

#if ESS_HALF
constexpr uint16_t kHalfCodes[32] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0,
    0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
#endif

// Step `step` of a word of codes, as the word that a product takes: a float, or a pair of bf16.
template <bool half, int bits>
ESS_LANE Ints code_word(Ints codes, int step) {
    if constexpr (!half) {
        const int from = step / 2 * bits + step % 2 * 16;
        if constexpr (bits == 4)
            return (Ints)__builtin_convertvector((codes >> from) & 15, Floats);
        return (Ints)__builtin_convertvector(codes << (24 - from) >> 24, Floats);
    }
#if ESS_HALF
    if constexpr (bits == 4)
        return (Ints)_mm512_permutexvar_epi16((__m512i)(codes >> (4 * step)),
                                              _mm512_loadu_si512(kHalfCodes));
    const Ints even = (Ints)__builtin_convertvector(codes << (24 - 8 * step) >> 24, Floats);
    const Ints odd = (Ints)__builtin_convertvector(codes << (8 - 8 * step) >> 24, Floats);
    return ((even >> 16) & 0xFFFF) | odd;
#else
    return codes;
#endif
}

#if ESS_TILES
// The code of each lane `from` a bit on.
template <int bits>
ESS_LANE Floats code_float(Ints codes, int from) {
    if constexpr (bits == 8) return __builtin_convertvector(codes << (24 - from) >> 24, Floats);
    const Floats known = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Floats)_mm512_permutexvar_ps((__m512i)(codes >> from), (__m512)known);
}
#endif

template <bool half, int bits>
constexpr int kStepsPerWord = (half ? 16 : 32) / bits;

template <bool half, int bits>
ESS_LANE void write_out(const uint32_t* codes, int64_t groups, uint32_t* to) {
    for (int64_t group = 0; group < groups; group++, codes += kLanes)
        for (int word = 0; word < bits; word++, codes += kLanes) {
            const Ints packed = load<Ints>(codes);
#pragma GCC unroll 8
            for (int step = 0; step < kStepsPerWord<half, bits>; step++, to += kLanes)
                store(to, code_word<half, bits>(packed, step));
        }
}

// `totals` += a group's scales times `sums`, and its offsets times the sums of inputs; `steps` are
// those of the first panel.
template <int rows, int vectors>
ESS_LANE void add_group(const Coded& c, int64_t token, int64_t group, const uint32_t* steps,
                        int64_t panel, const Floats (&sums)[rows][vectors],
                        Floats (&totals)[rows][vectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        const Ints both = load<Ints>(steps + v * panel);
        const Floats scale = widen_float16(both), offset = widen_float16(both >> 16);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const Floats whole = all(c.inputs[(token + row) * c.groups + group]);
            totals[row][v] = multiply_add(scale, sums[row][v], totals[row][v]);
            totals[row][v] = multiply_add(offset, whole, totals[row][v]);
        }
    }
}

#if ESS_TILES
// `totals` of up to `count` tokens += some groups of inputs times codes, a tile after another.
template <int bits, bool is_out, int some>
ESS_LANE void tile_groups(const Coded& c, int64_t token, int64_t count, int64_t group,
                          const uint32_t* codes, float (*totals)[kLanes]) {
    static_assert(some * kTileWords <= kGroupInputs * kPanelsTogether, "the room of few tokens");
    const uint32_t* left = c.product.words + token * c.product.steps + group * kTileWords;
    const uint32_t* out = c.room + (is_out ? group * kTileWords * kLanes : 0);
    const float* inputs = c.inputs + token * c.groups + group;
    alignas(64) float sums[some][kTileRows][kLanes];
    Floats scale[some], offset[some];
    if constexpr (!is_out) write_out<true, bits>(codes, some, c.room);
#pragma GCC unroll 4
    for (int g = 0; g < some; g++) {
        multiply_tiles<1, 1>(left + g * kTileWords, c.product.steps, out + g * kTileWords * kLanes,
                             0, kTileWords, sums[g][0]);
        const Ints both = load<Ints>(codes + (g + 1) * group_words(bits) - kLanes);
        scale[g] = widen_float16(both), offset[g] = widen_float16(both >> 16);
    }
    for (int64_t row = 0; row < count; row++, inputs += c.groups) {
        Floats total = load<Floats>(totals[row]);
#pragma GCC unroll 4
        for (int g = 0; g < some; g++) {
            total = multiply_add(scale[g], load<Floats>(sums[g][row]), total);
            total = multiply_add(offset[g], all(inputs[g]), total);
        }
        store(totals[row], total);
    }
}

// A tile of up to `count` tokens with a panel.
template <int bits, bool is_out>
ESS_LANE void coded_tile(const Coded& c, int64_t token, int64_t count, int64_t column) {
    const uint32_t* codes = c.product.panels + column / kLanes * c.groups * group_words(bits);
    alignas(64) float totals[kTileRows][kLanes] = {};
    int64_t group = 0;
    for (; group + 4 <= c.groups; group += 4, codes += 4 * group_words(bits))
        tile_groups<bits, is_out, 4>(c, token, count, group, codes, totals);
    for (; group < c.groups; group++, codes += group_words(bits))
        tile_groups<bits, is_out, 1>(c, token, count, group, codes, totals);
    for (int64_t row = 0; row < count; row++)
        store_sums(c.product, load<Floats>(totals[row]), token + row, column);
}

template <int bits, bool is_out>
ESS_LANE void coded_tiles(const Coded& c, int64_t tokens, int64_t column) {
    for (int64_t token = 0; token < tokens; token += kTileRows) {
        const int64_t rest = tokens - token;
        coded_tile<bits, is_out>(c, token, rest < kTileRows ? rest : kTileRows, column);
    }
}

// sums += one group of inputs times codes, even and odd inputs apart, as a tile adds them up.
template <int bits, int rows, int vectors>
ESS_LANE void multiply_apart(const uint32_t* left, int64_t stride, const uint32_t* codes,
                             int64_t panel, Floats (&sums)[rows][vectors]) {
    alignas(64) float inputs[rows][2][kLanes];
    for (int row = 0; row < rows; row++) {
        const Ints words = load<Ints>(left + row * stride);
        store(inputs[row][0], words << 16);
        store(inputs[row][1], words & ~0xFFFF);
    }
    Floats apart[2][rows][vectors] = {};
    for (int word = 0, step = 0; word < bits; word++, codes += kLanes) {
        Ints packed[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) packed[v] = load<Ints>(codes + v * panel);
#pragma GCC unroll 4
        for (int pair = 0; pair < kStepsPerWord<true, bits>; pair++, step++)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) {
                    const Floats code = code_float<bits>(packed[v], pair * bits + odd * 16);
#pragma GCC unroll 2
                    for (int row = 0; row < rows; row++)
                        apart[odd][row][v] =
                            multiply_add(code, all(inputs[row][odd][step]), apart[odd][row][v]);
                }
    }
#pragma GCC unroll 2
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[row][v] += apart[0][row][v] + apart[1][row][v];
}

// One or two tokens with up to four panels, with the bits of a tile.
template <int bits, int rows, int vectors>
ESS_LANE void coded_few(const Coded& c, int64_t column) {
    const Product& p = c.product;
    const int64_t panel = c.groups * group_words(bits);
    const uint32_t *codes = p.panels + column / kLanes * panel, *left = p.words;
    Floats totals[rows][vectors] = {};
    for (int64_t group = 0; group < c.groups; group++, left += kTileWords) {
        Floats sums[rows][vectors] = {};
        multiply_apart<bits>(left, p.steps, codes, panel, sums);
        codes += group_words(bits);
        add_group(c, 0, group, codes - kLanes, panel, sums, totals);
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            store_sums(p, totals[row][v], row, column + v * kLanes);
}

template <int bits, int rows>
ESS_LANE void coded_few_in(const Coded& c) {
    int64_t column = 0;
    for (; column + 3 * kLanes < c.product.out_dim; column += 4 * kLanes)
        coded_few<bits, rows, 4>(c, column);
    switch ((c.product.out_dim - column + kLanes - 1) / kLanes) {
        case 3: coded_few<bits, rows, 3>(c, column); break;
        case 2: coded_few<bits, rows, 2>(c, column); break;
        case 1: coded_few<bits, rows, 1>(c, column);
    }
}

template <int bits>
__attribute__((noinline)) void coded_in(const Coded& c, int64_t tokens) {
    if (tokens == 1) return coded_few_in<bits, 1>(c);
    if (tokens == 2) return coded_few_in<bits, 2>(c);
    const Tiles tiles(tokens < kTileRows ? tokens : kTileRows);
    const int64_t panel = c.groups * group_words(bits);
    for (int64_t column = 0; column < c.product.out_dim; column += kLanes) {
        if (tokens <= kTileRows) {
            coded_tiles<bits, false>(c, tokens, column);
            continue;
        }
        write_out<true, bits>(c.product.panels + column / kLanes * panel, c.groups, c.room);
        coded_tiles<bits, true>(c, tokens, column);
    }
}

// Tiles take subnormal numbers as zeros, whatever a thread does, so the rest does so too.
void coded_product(const Coded& c, int64_t tokens, int64_t bits) {
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    bits == 4 ? coded_in<4>(c, tokens) : coded_in<8>(c, tokens);
    _mm_setcsr(before);
}
#else
// sums += one group of inputs times codes.
template <bool half, int bits, int rows, int vectors>
ESS_LANE void multiply_codes(const uint32_t* left, int64_t stride, const uint32_t* codes,
                             int64_t panel, Floats (&sums)[rows][vectors]) {
    for (int word = 0; word < bits; word++, codes += kLanes) {
        Ints packed[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) packed[v] = load<Ints>(codes + v * panel);
#pragma GCC unroll 8
        for (int step = 0; step < kStepsPerWord<half, bits>; step++, left++) {
            Ints columns[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) columns[v] = code_word<half, bits>(packed[v], step);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                const Ints input = repeat<1>(left + row * stride);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++)
                    sums[row][v] = dot<half>(sums[row][v], input, columns[v]);
            }
        }
    }
}

template <bool half, int bits, bool is_out, int rows, int vectors>
ESS_LANE void coded_block(const Coded& c, int64_t token, int64_t column) {
    constexpr int64_t inputs = half ? kGroupInputs / 2 : kGroupInputs;
    const Product& p = c.product;
    const int64_t panel = c.groups * group_words(bits), out_panel = p.steps * kLanes;
    const uint32_t* codes = p.panels + column / kLanes * panel;
    const uint32_t *left = p.words + token * p.steps, *out = c.room;
    Floats totals[rows][vectors] = {};
    for (int64_t group = 0; group < c.groups; group++) {
        Floats sums[rows][vectors] = {};
        if constexpr (is_out)
            panel_block<half>(left, p.steps, out, out_panel, inputs, sums);
        else
            multiply_codes<half, bits>(left, p.steps, codes, panel, sums);
        left += inputs, out += inputs * kLanes;
        codes += group_words(bits);
        add_group(c, token, group, codes - kLanes, panel, sums, totals);
    }
    store_block(p, totals, token, column);
}

template <bool half, int bits, bool is_out, int vectors>
ESS_LANE void coded_tokens(const Coded& c, int64_t tokens, int64_t column) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) coded_block<half, bits, is_out, 4, vectors>(c, t, column);
    if (t + 2 <= tokens) coded_block<half, bits, is_out, 2, vectors>(c, t, column), t += 2;
    if (t < tokens) coded_block<half, bits, is_out, 1, vectors>(c, t, column);
}

template <bool half, int bits, int vectors>
ESS_LANE void coded_columns(const Coded& c, int64_t tokens, int64_t column) {
    if (tokens < kWriteOutFrom) return coded_tokens<half, bits, false, vectors>(c, tokens, column);
    const int64_t panel = c.groups * group_words(bits);
    for (int v = 0; v < vectors; v++)
        write_out<half, bits>(c.product.panels + (column / kLanes + v) * panel, c.groups,
                              c.room + v * c.product.steps * kLanes);
    coded_tokens<half, bits, true, vectors>(c, tokens, column);
}

template <bool half, int bits>
void coded_in(const Coded& c, int64_t tokens) {
    int64_t column = 0;
    for (; column + 3 * kLanes < c.product.out_dim; column += 4 * kLanes)
        coded_columns<half, bits, 4>(c, tokens, column);
    for (; column < c.product.out_dim; column += kLanes)
        coded_columns<half, bits, 1>(c, tokens, column);
}

void coded_product(const Coded& c, int64_t tokens, int64_t bits, [[maybe_unused]] bool half) {
#if ESS_HALF
    if (half && in_tiles(c.product.steps)) return coded_in_tiles(c, tokens, bits);
    if (half) return bits == 4 ? coded_in<true, 4>(c, tokens) : coded_in<true, 8>(c, tokens);
#endif
    return bits == 4 ? coded_in<false, 4>(c, tokens) : coded_in<false, 8>(c, tokens);
}

// What the words of one group of inputs add up to.
ESS_LANE float group_sum(const uint32_t* words, bool half) {
    Floats lanes = {};
    for (int64_t i = 0; i < (half ? kGroupInputs / 2 : kGroupInputs); i += kLanes) {
        const Ints some = load<Ints>(words + i);
        lanes += half ? (Floats)(some << 16) : (Floats)some;
        if (half) lanes += (Floats)(some & ~0xFFFF);
    }
    float sum = 0;
    for (int64_t lane = 0; lane < kLanes; lane++) sum += lanes[lane];
    return sum;
}

// One matrix: codes [out, in], two to a byte for 4 bits; float16 [out, group, scale and offset].
void pack_codes(const uint8_t* codes, const uint16_t* steps, int64_t bits, int64_t out_dim,
                int64_t in_dim, uint32_t* to) {
    const int64_t groups = in_dim / kGroupInputs, pairs = 16 / bits;
    const auto code = [&](int64_t row, int64_t i) -> uint32_t {
        if (bits == 8) return codes[row * in_dim + i];
        return codes[(row * in_dim + i) / 2] >> 4 * (i % 2) & 15;
    };
    for (int64_t column = 0; column < out_dim; column += kLanes)
        for (int64_t group = 0; group < groups; group++, to += (bits + 1) * kLanes)
            for (int64_t lane = 0; lane < kLanes; lane++) {
                const int64_t row = column + lane;
                const bool is_there = row < out_dim;
                for (int64_t word = 0; word < bits; word++) {
                    uint32_t packed = 0;
                    const int64_t first = group * kGroupInputs + word * 2 * pairs;
                    for (int64_t i = 0; is_there && i < 2 * pairs; i++)
                        packed |= code(row, first + i) << (i / 2 * bits + i % 2 * 16);
                    to[word * kLanes + lane] = packed;
                }
                const uint16_t* step = steps + (row * groups + group) * 2;
                to[bits * kLanes + lane] = is_there ? step[0] | uint32_t(step[1]) << 16 : 0;
            }
}
#endif
