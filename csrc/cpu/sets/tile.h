// Vectors, and the one product of matrices that attention and index logits are made of.
//
// Included once per instruction set, inside its namespace, with ESS_LANES floats per vector. Tiles
// are made of 32-bit words: a word is one float, or two bf16 that lie side by side along the axis
// that is summed over, and then `dot` multiplies and adds both.
//
// A sum belongs to one lane (or to `spread` neighbouring ones, folded at the end) and grows word by
// word in the order of its axis. So its bits depend neither on the shape of the block that it was
// computed in nor on what stands beside it.
#pragma once

typedef float Floats __attribute__((vector_size(4 * ESS_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * ESS_LANES)));
typedef int64_t Longs __attribute__((vector_size(4 * ESS_LANES)));

constexpr int64_t kLanes = ESS_LANES;

ESS_LANE int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

template <typename Vector>
ESS_LANE Vector load(const void* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}

template <typename Vector>
ESS_LANE void store(void* to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof vector);
}

// Gives `array` the scratch memory from `at` on, in whole lines.
template <typename T>
ESS_LANE void lay(uintptr_t& at, T*& array, int64_t count) {
    array = (T*)at;
    at += round_up(count * int64_t(sizeof(T)), 64);
}

ESS_LANE Floats all(float value) { return Floats{} + value; }

template <bool half>
ESS_LANE Floats dot(Floats sum, Ints a, Ints b) {
#if ESS_LANES == 16
#if ESS_HALF
    if constexpr (half) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif ESS_LANES == 8
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + (Floats)a * (Floats)b;
#endif
}

ESS_LANE Floats multiply_add(Floats a, Floats b, Floats sum) {
    return dot<false>(sum, (Ints)a, (Ints)b);
}

// `spread` words, over and over.
template <int spread>
ESS_LANE Ints repeat(const uint32_t* from) {
    if constexpr (spread == 1) {
        int32_t one;
        __builtin_memcpy(&one, from, 4);
        return Ints{} + one;
    }
    if constexpr (spread == 2) {
        int64_t both;
        __builtin_memcpy(&both, from, 8);
        return (Ints)(Longs{} + both);
    }
#if ESS_LANES == 16
    return (Ints)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
#elif ESS_LANES == 8
    return (Ints)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
#else
    return load<Ints>(from);
#endif
}

#if ESS_LANES == 16
#define ESS_TURN(v, order) (Floats)_mm512_permute_ps((__m512)(v), order)
#elif ESS_LANES == 8
#define ESS_TURN(v, order) (Floats)_mm256_permute_ps((__m256)(v), order)
#else
#define ESS_TURN(v, order) (Floats)_mm_shuffle_ps((__m128)(v), (__m128)(v), order)
#endif

// Two lanes of every quarter of a, then two of b.
#if ESS_LANES == 16
#define ESS_PICK(a, b, order) (Floats)_mm512_shuffle_ps((__m512)(a), (__m512)(b), order)
#elif ESS_LANES == 8
#define ESS_PICK(a, b, order) (Floats)_mm256_shuffle_ps((__m256)(a), (__m256)(b), order)
#else
#define ESS_PICK(a, b, order) (Floats)_mm_shuffle_ps((__m128)(a), (__m128)(b), order)
#endif

// Every lane gets the sum of the `spread` lanes that it belongs to.
template <int spread>
ESS_LANE Floats fold(Floats sum) {
    if constexpr (spread >= 2) sum += ESS_TURN(sum, 0xB1);
    if constexpr (spread >= 4) sum += ESS_TURN(sum, 0x4E);
    return sum;
}

// One factor of a product, read word by word: word (row, step) at from[row * stride + step * next].
struct Factor {
    const uint32_t* from;
    int64_t stride;
    int64_t next;
};

struct Nothing {
    __attribute__((always_inline)) void request(int64_t) const {}
    bool wants(int64_t) const { return false; }
    Nothing part(int64_t, int64_t) const { return {}; }
};

// sums[row][column] += rows of `left` times columns of `right`, [step, vector of columns], vectors
// side by side or `vector_stride` apart. What will be needed later is requested from memory
// meanwhile, a little at every step.
template <bool half, int spread, int rows, int vectors, typename Later = Nothing>
ESS_LANE void multiply(Factor left, const uint32_t* right, int64_t right_stride, int64_t steps,
                       Floats (&sums)[rows][vectors], const Later& later = {},
                       int64_t vector_stride = kLanes) {
    for (int64_t step = 0; step < steps; step++) {
        later.request(step);
        Ints columns[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) columns[v] = load<Ints>(right + v * vector_stride);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            Ints word = repeat<spread>(left.from + row * left.stride);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                sums[row][v] = dot<half>(sums[row][v], word, columns[v]);
        }
        left.from += left.next;
        right += right_stride;
    }
    for (int64_t step = steps; later.wants(step); step++) later.request(step);
}

constexpr int64_t kHeadBlock = 4;

// How many lanes each head takes: with few heads, neighbouring words of a sum fill the vector.
// Heads are counted in whole blocks, so that the lanes of a block are always there.
ESS_LANE int64_t spread_of(int64_t heads, int64_t words) {
    const int64_t whole = round_up(heads, kHeadBlock);
    int64_t spread = kLanes >= 8 ? 4 : 1;
    while (spread > 1 && (whole * spread > kLanes || words % spread)) spread /= 2;
    return spread;
}

// A query [head, dim] as words [step, head * spread + part], zeros where there is no head.
struct Packing {
    int64_t head_count, words, spread, width;

    Packing(int64_t heads, int64_t of_heads, int64_t word_count)
        : head_count(heads), words(word_count), spread(spread_of(of_heads, word_count)),
          width(round_up(heads * spread, kLanes)) {}
    int64_t steps() const { return words / spread; }
    int64_t word_count() const { return steps() * width; }
};

ESS_LANE float number(const uint8_t* from, int64_t form, int64_t i) {
    if (form == Form::fp8) return e4m3_decode(from[i]);
    if (form == Form::bf16) return bf16_widen(((const half_any*)from)[i]);
    return ((const float_any*)from)[i];
}

// What already is as it should be is taken word by word.
template <bool half>
ESS_LANE uint32_t word(const uint8_t* from, int64_t form, int64_t i) {
    if (form == (half ? Form::bf16 : Form::f32)) {
        uint32_t plain;
        __builtin_memcpy(&plain, from + 4 * i, 4);
        return plain;
    }
    if constexpr (!half) return as_bits(number(from, form, i));
    return bf16_round(number(from, form, 2 * i)) |
           uint32_t(bf16_round(number(from, form, 2 * i + 1))) << 16;
}

template <bool half>
ESS_LANE void pack(const Packing& p, const uint8_t* query, int64_t form, int64_t head_stride,
                   uint32_t* words) {
    const int64_t used = p.head_count * p.spread;
    for (int64_t i = 0; i < p.words; i += p.spread, words += p.width) {
        for (int64_t head = 0; head < p.head_count; head++)
            for (int64_t part = 0; part < p.spread; part++)
                words[head * p.spread + part] =
                    word<half>(query + head * head_stride, form, i + part);
        __builtin_memset(words + used, 0, (p.width - used) * 4);
    }
}
