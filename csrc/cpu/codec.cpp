// Rows and index keys to bytes and back: one body, compiled for three instruction sets, the widest
// taken at run time.
//
// A group with a NaN or an infinity in it is written as NaN throughout: NaN scale, NaN codes. The
// scale alone poisons the group even for a reader that takes the NaN code for 480.
#include "codec.h"

#include "encoding.h"

namespace ess {

ESS_LANE void put_scale(char* at, float scale, bool is_byte) {
    const uint32_t bits = as_bits(scale);
    if (is_byte)
        *at = char(bits >> 23);
    else
        std::memcpy(at, &bits, 4);
}

ESS_LANE float get_scale(const char* at, bool is_byte) {
    if (is_byte) return byte_scale(uint8_t(*at));
    float scale;
    std::memcpy(&scale, at, 4);
    return scale;
}

// Returns the scale.
template <bool bf16>
ESS_LANE float encode_group(const char* __restrict values, int64_t size, bool power_of_two,
                            uint8_t* __restrict codes) {
    uint32_t amax = 0;  // as bits: magnitudes order like integers, infinity and NaN at the top
    for (int64_t i = 0; i < size; i++) {
        uint32_t magnitude = as_bits(load<bf16>(values, i)) & 0x7FFFFFFFu;
        amax = magnitude > amax ? magnitude : amax;
    }
    if (amax >= inf_bits) {
        std::memset(codes, nan_code, size);
        return as_float(nan_bits);
    }
    const float scale = scale_of(as_float(amax), power_of_two);
    for (int64_t i = 0; i < size; i++) codes[i] = e4m3_encode(load<bf16>(values, i) / scale);
    return scale;
}

template <bool bf16>
ESS_LANE void encode_rows(const Strides f, const char* values, uint8_t* codes, char* scales,
                          char* tail) {
    const int64_t group_bytes = f.group_size * (bf16 ? 2 : 4), apart = f.scale_is_byte ? 1 : 4;
    for (int64_t r = 0; r < f.row_count; r++) {
        const char* from = values + r * f.value_stride;
        for (int64_t g = 0; g < f.group_count; g++, from += group_bytes) {
            uint8_t* to = codes + r * f.row_stride + g * f.group_size;
            const float scale = encode_group<bf16>(from, f.group_size, f.power_of_two, to);
            put_scale(scales + r * f.scale_stride + g * apart, scale, f.scale_is_byte);
        }
        if (f.tail_count == 0) continue;
        char* to = tail + r * f.row_stride;
        if (bf16)
            std::memcpy(to, from, f.tail_count * 2);
        else
            for (int64_t i = 0; i < f.tail_count; i++) store<true>(to, i, load<false>(from, i));
    }
}

template <bool avx512, bool bf16>
ESS_LANE void decode_rows(const Strides f, char* values, const uint8_t* codes, const char* scales,
                          const char* tail) {
    const int64_t group_bytes = f.group_size * (bf16 ? 2 : 4), apart = f.scale_is_byte ? 1 : 4;
    for (int64_t r = 0; r < f.row_count; r++) {
        char* to = values + r * f.value_stride;
        for (int64_t g = 0; g < f.group_count; g++, to += group_bytes) {
            const char* at = scales + r * f.scale_stride + g * apart;
            const float scale = get_scale(at, f.scale_is_byte);
            const uint8_t* from = codes + r * f.row_stride + g * f.group_size;
            if constexpr (avx512)
                decode_group_avx512<bf16>(from, scale, f.group_size, to);
            else
                decode_group<bf16>(from, scale, f.group_size, to);
        }
        const char* from = tail + r * f.row_stride;
        if (bf16)
            std::memcpy(to, from, f.tail_count * 2);
        else
            for (int64_t i = 0; i < f.tail_count; i++) store<false>(to, i, load<true>(from, i));
    }
}

#define ESS_CODEC(set, target, avx512)                                                  \
    target static void encode_##set(const Strides& f, const char* values, uint8_t* codes,  \
                                    char* scales, char* tail) {                         \
        f.value_is_bf16 ? encode_rows<true>(f, values, codes, scales, tail)             \
                        : encode_rows<false>(f, values, codes, scales, tail);           \
    }                                                                                   \
    target static void decode_##set(const Strides& f, char* values, const uint8_t* codes,  \
                                    const char* scales, const char* tail) {             \
        f.value_is_bf16 ? decode_rows<avx512, true>(f, values, codes, scales, tail)     \
                        : decode_rows<avx512, false>(f, values, codes, scales, tail);   \
    }

ESS_CODEC(avx512, ESS_AVX512, true)
ESS_CODEC(avx2, ESS_AVX2, false)
ESS_CODEC(portable, , false)

}  // namespace ess

ESS_EXPORT void ess_codec_encode(const ess::Strides* form, const char* values, uint8_t* codes,
                                 char* scales, char* tail) {
    switch (ess::isa()) {
        case ess::Isa::avx512: return ess::encode_avx512(*form, values, codes, scales, tail);
        case ess::Isa::avx2: return ess::encode_avx2(*form, values, codes, scales, tail);
        default: return ess::encode_portable(*form, values, codes, scales, tail);
    }
}

ESS_EXPORT void ess_codec_decode(const ess::Strides* form, char* values, const uint8_t* codes,
                                 const char* scales, const char* tail) {
    switch (ess::isa()) {
        case ess::Isa::avx512: return ess::decode_avx512(*form, values, codes, scales, tail);
        case ess::Isa::avx2: return ess::decode_avx2(*form, values, codes, scales, tail);
        default: return ess::decode_portable(*form, values, codes, scales, tail);
    }
}
