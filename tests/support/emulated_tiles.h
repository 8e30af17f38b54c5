// The tile registers that csrc/cpu/sets/tiles.h uses, in plain C++, one set for each thread. What
// the machine does not allow ends the process: a tile without a shape, shapes that do not fit
// together, rows of another length.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace played {

struct Shapes {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct Registers {
    Shapes shapes = {};
    uint32_t words[8][16][16] = {};
};

inline Registers& here() {
    static thread_local Registers registers;
    return registers;
}

inline void must(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}

inline void check_shape(int tile) {
    const Shapes& shapes = here().shapes;
    must(shapes.palette == 1, "no shapes are loaded");
    must(shapes.rows[tile] >= 1 && shapes.rows[tile] <= 16, "a tile without rows");
    must(shapes.row_bytes[tile] >= 4 && shapes.row_bytes[tile] <= 64, "a row of no length");
}

inline void load_shapes(const void* from) {
    memcpy(&here().shapes, from, sizeof(Shapes));
    memset(here().words, 0, sizeof here().words);
}

inline void store_shapes(void* to) { memcpy(to, &here().shapes, sizeof(Shapes)); }

inline void release() { here() = Registers{}; }

inline void zero(int tile) {
    check_shape(tile);
    memset(here().words[tile], 0, sizeof here().words[tile]);
}

inline void load(int tile, const void* from, int64_t stride) {
    check_shape(tile);
    zero(tile);
    for (int row = 0; row < here().shapes.rows[tile]; row++)
        memcpy(here().words[tile][row], (const char*)from + row * stride,
               here().shapes.row_bytes[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
    check_shape(tile);
    for (int row = 0; row < here().shapes.rows[tile]; row++)
        memcpy((char*)to + row * stride, here().words[tile][row], here().shapes.row_bytes[tile]);
}

// Nearly all time goes into products: the compiler makes vectors of a row of the sum.
#pragma GCC push_options
#pragma GCC optimize("O3")
#pragma GCC target("avx2,fma")

// A subnormal operand or result is zero.
inline float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }

inline float half_of(uint32_t word, int odd) {
    const uint32_t bits = odd ? word & 0xFFFF0000u : word << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

inline void add_products(const uint32_t* left, const uint32_t (*right)[16], int steps,
                         float (&total)[16]) {
    float halves[2][16] = {};
    for (int step = 0; step < steps; step++)
        for (int odd = 0; odd < 2; odd++) {
            const float factor = half_of(left[step], odd);
            for (int column = 0; column < 16; column++)
                halves[odd][column] = flushed(
                    fmaf(factor, half_of(right[step][column], odd), halves[odd][column]));
        }
    for (int column = 0; column < 16; column++)
        total[column] =
            flushed(flushed(total[column]) + flushed(halves[0][column] + halves[1][column]));
}
#pragma GCC pop_options

inline void multiply(int sum, int left, int right) {
    check_shape(sum), check_shape(left), check_shape(right);
    const Shapes& shapes = here().shapes;
    const int steps = shapes.row_bytes[left] / 4, columns = shapes.row_bytes[right] / 4;
    must(shapes.rows[right] == steps, "as many words of the left as rows of the right");
    must(shapes.rows[sum] == shapes.rows[left] && shapes.row_bytes[sum] / 4 == columns, "the sum");
    auto& words = here().words;
    for (int row = 0; row < shapes.rows[left]; row++) {
        float total[16];
        memcpy(total, words[sum][row], sizeof total);
        add_products(words[left][row], words[right], steps, total);
        memcpy(words[sum][row], total, columns * sizeof *total);
    }
}

}  // namespace played

// This thread's shapes, as a library that has its own would load and find them.
extern "C" __attribute__((visibility("default"))) void played_load_shapes(const void* from) {
    played::load_shapes(from);
}
extern "C" __attribute__((visibility("default"))) void played_store_shapes(void* to) {
    played::store_shapes(to);
}

#define _tile_loadconfig(from) played::load_shapes(from)
#define _tile_storeconfig(to) played::store_shapes(to)
#define _tile_release() played::release()
#define _tile_zero(tile) played::zero(tile)
#define _tile_loadd(tile, from, stride) played::load(tile, from, stride)
#define _tile_stored(tile, to, stride) played::store(tile, to, stride)
#define _tile_dpbf16ps(sum, left, right) played::multiply(sum, left, right)
