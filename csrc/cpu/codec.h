// Narrow floats, one lane at a time, written so that a compiler vectorises the loops around them,
// and the decoder of one scale group. ess/kernels/reference/formats.py says in NumPy what each must
// return.
//
// Both directions avoid subnormal operands in float arithmetic: a thread that flushes subnormals
// (torch.set_flush_denormal) gets the same bytes, and no CPU takes a microcode assist. Shifting an
// e4m3 code into a float's place and multiplying by 2^120 is shorter, and has both faults.
//
// Unaligned types: a row starts at any multiple of 4 and its parts where the codec puts them.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 says these of its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

#define ESS_AVX2 __attribute__((target("avx2")))
#define ESS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")))
#define ESS_VBMI \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,prefer-vector-width=512")))
#define ESS_LANE static inline __attribute__((always_inline))

namespace ess {

typedef float __attribute__((aligned(1), may_alias)) float_any;
typedef uint16_t __attribute__((aligned(1), may_alias)) half_any;

constexpr uint32_t nan_bits = 0x7FC00000u;
constexpr uint32_t inf_bits = 0x7F800000u;
constexpr uint32_t tiny_bits = 121u << 23;                // 2^-6, the least normal e4m3
constexpr uint32_t top_bits = (135u << 23) | 0x680000u;  // 464, the greatest that is not NaN
constexpr uint8_t nan_code = 0x7F;

ESS_LANE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

ESS_LANE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// A select without control flow: compilers do not vectorise around float branches.
ESS_LANE uint32_t pick(bool condition, uint32_t yes, uint32_t no) {
    uint32_t mask = -uint32_t(condition);
    return (yes & mask) | (no & ~mask);
}

ESS_LANE float bf16_widen(uint16_t bits) { return as_float(uint32_t(bits) << 16); }

// Nearest, ties to even; every NaN becomes 0x7FC0.
ESS_LANE uint16_t bf16_round(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t(pick((bits & 0x7FFFFFFFu) > inf_bits, 0x7FC0u, rounded));
}

// The exponent moves from bias 7 to bias 127. Codes 0..7 are m * 2^-9: read as 2^-6 * (1 + m/8),
// then 2^-6 is taken away, exactly.
ESS_LANE float e4m3_decode(uint8_t code) {
    uint32_t magnitude = code & 0x7Fu;
    uint32_t small = pick(magnitude < 8, 1u, 0u);
    float value = as_float((magnitude << 20) + ((120u + small) << 23));
    value -= as_float(small * tiny_bits);
    uint32_t bits = pick(magnitude == nan_code, 0x7FF00000u, as_bits(value));
    return as_float(bits | uint32_t(code & 0x80u) << 24);
}

// Nearest, ties to even. 464 is the tie between 448 and the code after it, which is NaN; all above
// it, infinity included, is NaN. Below 2^-6 the addition of 2^14, whose unit in the last place is
// 2^-9, does the rounding.
ESS_LANE uint8_t e4m3_encode(float value) {
    uint32_t bits = as_bits(value);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t small = as_bits(as_float(magnitude) + 16384.0f) - (141u << 23);
    uint32_t normal = (magnitude - (120u << 23) + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
    uint32_t code = pick(magnitude < tiny_bits, small, normal);
    code = pick(magnitude > top_bits, nan_code, code);
    return uint8_t(code | ((bits >> 24) & 0x80u));
}

// amax / 448, no less than 1e-4 / 448, and rounded up to a power of two when asked.
ESS_LANE float scale_of(float amax, bool power_of_two) {
    float scale = (amax > 1e-4f ? amax : 1e-4f) / 448.0f;
    if (!power_of_two) return scale;
    return as_float((as_bits(scale) + 0x7FFFFFu) & inf_bits);
}

// A scale in a byte is the exponent of a power of two (e8m0); 255 is no number.
ESS_LANE float byte_scale(uint8_t exponent) {
    const uint32_t bits = pick(exponent == 0, 1u << 22, uint32_t(exponent) << 23);
    return as_float(pick(exponent == 255, nan_bits, bits));
}

template <bool bf16>
ESS_LANE float load(const char* values, int64_t i) {
    if (bf16) return bf16_widen(reinterpret_cast<const half_any*>(values)[i]);
    return reinterpret_cast<const float_any*>(values)[i];
}

template <bool bf16>
ESS_LANE void store(char* values, int64_t i, float value) {
    if (bf16)
        reinterpret_cast<half_any*>(values)[i] = bf16_round(value);
    else
        reinterpret_cast<float_any*>(values)[i] = value;
}

template <bool bf16>
ESS_LANE void decode_group(const uint8_t* __restrict codes, float scale, int64_t size,
                           char* __restrict values) {
    for (int64_t i = 0; i < size; i++) store<bf16>(values, i, e4m3_decode(codes[i]) * scale);
}

// For a power-of-two scale every product is a bf16 with at most three mantissa bits, so 32 codes
// are decoded in 16-bit integer lanes: exponent and mantissa move four up and the scale's exponent
// is added to them. Codes 0..7 have no leading one to move; their products come from a table of
// eight. Sound only while every product is a normal number, so `decode_group_avx512` looks at the
// scale first. Sizes are multiples of 32.
struct Table {
    __m512i base, small;
};

ESS_AVX512 static inline Table table_of(float scale) {
    // bf16 of m * 2^-9; zero takes no exponent
    const __m512i tiny = _mm512_broadcast_i32x4(_mm_setr_epi16(
        0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
    int exponent = int(as_bits(scale) >> 23) - 127;
    __m512i shift = _mm512_set1_epi16(short(exponent * 128));
    return {_mm512_add_epi16(_mm512_set1_epi16(120 << 7), shift),
            _mm512_mask_add_epi16(tiny, 0xFEFEFEFEu, tiny, shift)};
}

ESS_AVX512 static inline __m512i decode_32(const uint8_t* codes, const Table& table) {
    __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
    __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7F));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), table.base);
    __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(nan_code));
    bits = _mm512_mask_permutexvar_epi16(bits, is_small, magnitude, table.small);
    __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7F), code), 8);
    bits = _mm512_or_si512(bits, sign);
    return _mm512_mask_mov_epi16(bits, is_nan, _mm512_set1_epi16(0x7FC0));
}

ESS_AVX512 static inline void widen_32(__m512i bits, char* values) {
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, 1));
    _mm512_storeu_si512(values, _mm512_slli_epi32(low, 16));
    _mm512_storeu_si512(values + 64, _mm512_slli_epi32(high, 16));
}

// Scales that are powers of two, and under which every product is a normal number or zero.
constexpr uint32_t kLeastExponent = 10, kMostExponent = 246;

ESS_LANE bool is_plain(float scale) {
    const uint32_t bits = as_bits(scale);
    return (bits & 0x7FFFFFu) == 0 && bits >= kLeastExponent << 23 && bits <= kMostExponent << 23;
}

// bf16 of all 128 magnitudes for such a scale, low and high bytes apart. All have the scale's
// exponent in theirs but zero and NaN.
struct Magnitudes {
    alignas(64) uint8_t low[128] = {};
    alignas(64) uint8_t high[128] = {};

    constexpr Magnitudes(uint32_t exponent = 127) {
        constexpr uint16_t tiny[8] = {0,      0x3B00, 0x3B80, 0x3BC0,
                                      0x3C00, 0x3C20, 0x3C40, 0x3C60};
        for (int i = 0; i < 128; i++) {
            uint16_t bits = i < 8 ? tiny[i] : uint16_t((120 << 7) + (i << 4));
            bits = uint16_t(bits + (i ? (exponent - 127) * 128 : 0));
            if (i == nan_code) bits = 0x7FC0;
            low[i] = uint8_t(bits);
            high[i] = uint8_t(bits >> 8);
        }
    }
};

struct MagnitudesByScale {
    Magnitudes of[kMostExponent - kLeastExponent + 1];

    constexpr MagnitudesByScale() {
        for (uint32_t e = kLeastExponent; e <= kMostExponent; e++)
            of[e - kLeastExponent] = Magnitudes(e);
    }
};
inline constexpr MagnitudesByScale kMagnitudes;

// Magnitudes are looked up as bytes, sixty-four at a time; only codes of numbers get a sign. Sizes
// are multiples of 64.
ESS_VBMI static inline void decode_looked_up(const uint8_t* codes, float scale, int64_t size,
                                             char* values) {
    const Magnitudes& table = kMagnitudes.of[(as_bits(scale) >> 23) - kLeastExponent];
    const __m512i low_a = _mm512_load_si512(table.low), low_b = _mm512_load_si512(table.low + 64);
    const __m512i high_a = _mm512_load_si512(table.high);
    const __m512i high_b = _mm512_load_si512(table.high + 64);
    const __m512i halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < size; i += 64) {
        const __m512i code = _mm512_permutexvar_epi64(halves, _mm512_loadu_si512(codes + i));
        const __m512i down = _mm512_permutex2var_epi8(low_a, code, low_b);
        const __m512i up = _mm512_permutex2var_epi8(high_a, code, high_b);
        const __mmask64 is_negative = _mm512_cmplt_epi8_mask(code, _mm512_set1_epi8(-1));
        const __m512i top = _mm512_mask_add_epi8(up, is_negative, up, _mm512_set1_epi8(-128));
        _mm512_storeu_si512(values + 2 * i, _mm512_unpacklo_epi8(down, top));
        _mm512_storeu_si512(values + 2 * i + 64, _mm512_unpackhi_epi8(down, top));
    }
}

// The groups of a row, 128 codes each, whose scales lie behind one another.
ESS_VBMI static inline void decode_groups_looked_up(const uint8_t* codes, const float_any* scales,
                                                    int64_t groups, char* values) {
    for (int64_t group = 0; group < groups; group++, codes += 128, values += 256) {
        if (is_plain(scales[group]))
            decode_looked_up(codes, scales[group], 128, values);
        else
            decode_group<true>(codes, scales[group], 128, values);
    }
}

template <bool bf16>
ESS_AVX512 static inline void decode_group_avx512(const uint8_t* codes, float scale, int64_t size,
                                                  char* values) {
    if (!is_plain(scale)) return decode_group<bf16>(codes, scale, size, values);
    if (bf16 && size % 64 == 0 && __builtin_cpu_supports("avx512vbmi"))
        return decode_looked_up(codes, scale, size, values);
    Table table = table_of(scale);
    for (int64_t i = 0; i < size; i += 32) {
        __m512i products = decode_32(codes + i, table);
        if (bf16)
            _mm512_storeu_si512(values + 2 * i, products);
        else
            widen_32(products, values + 4 * i);
    }
}

// What `decode_group` does for each group of a row.
template <bool bf16>
ESS_LANE void decode_groups(const uint8_t* codes, const float_any* scales, int64_t groups,
                            char* values) {
    for (int64_t group = 0; group < groups; group++)
        decode_group<bf16>(codes + 128 * group, scales[group], 128,
                           values + group * 128 * (bf16 ? 2 : 4));
}

template <bool bf16>
ESS_AVX512 static inline void decode_groups_avx512(const uint8_t* codes, const float_any* scales,
                                                   int64_t groups, char* values) {
    if (bf16 && __builtin_cpu_supports("avx512vbmi"))
        return decode_groups_looked_up(codes, scales, groups, values);
    for (int64_t group = 0; group < groups; group++)
        decode_group_avx512<bf16>(codes + 128 * group, scales[group], 128,
                                  values + group * 128 * (bf16 ? 2 : 4));
}

}  // namespace ess
