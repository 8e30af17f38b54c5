// The k greatest of a list, exactly, in time proportional to its length.
//
// Floats become unsigned keys of the same order: NaN is the greatest, the two zeros are equal. The
// k-th greatest key is found by counting, eleven bits at a time, among those that still can be it;
// one pass in the order of positions then takes all above it and the first ones equal to it.
//
// A long list is cut down first: a sample guesses a value that slightly more than k logits reach.
// The guess costs time only: logits that reach it are kept, and when they are fewer than k the
// whole list is used.
#pragma once

constexpr int64_t kSample = 1024;
constexpr int kBins = 1 << 11;

struct Candidates {
    uint32_t* keys;
    int32_t* positions;
    uint32_t* spare;  // as long as keys
};

ESS_LANE uint32_t order_of(float logit) {
    uint32_t bits = as_bits(logit);
    bits = pick(bits == 0x80000000u, 0u, bits);
    uint32_t key = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
    return pick((bits & 0x7FFFFFFFu) > inf_bits, 0xFFFFFFFFu, key);
}

// The logit of a key; of the two zeros, 0.
ESS_LANE float value_of(uint32_t key) {
    return as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Those that are not below `least`, NaN among them.
ESS_LANE int64_t keep_from(const float* logits, int64_t count, float least,
                           const Candidates& kept) {
    int64_t found = 0, i = 0;
#if ESS_LANES == 16
    __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= count; i += 16) {
        const __m512 here = _mm512_loadu_ps(logits + i);
        const __mmask16 keeps = _mm512_cmp_ps_mask(here, _mm512_set1_ps(least), _CMP_NLT_UQ);
        _mm512_storeu_ps((float*)kept.keys + found, _mm512_maskz_compress_ps(keeps, here));
        _mm512_storeu_si512(kept.positions + found, _mm512_maskz_compress_epi32(keeps, position));
        position = _mm512_add_epi32(position, _mm512_set1_epi32(16));
        found += __builtin_popcount(keeps);
    }
#endif
    for (; i < count; i++) {
        __builtin_memcpy(kept.keys + found, logits + i, 4);
        kept.positions[found] = int32_t(i);
        found += !(logits[i] < least);
    }
    return found;
}

ESS_LANE void keys_of(const void* logits, int64_t count, uint32_t* keys) {
    for (int64_t i = 0; i < count; i++) keys[i] = order_of(((const float_any*)logits)[i]);
}

// Those of `keys` whose bits from `shift` on are `prefix`.
ESS_LANE int64_t keep_prefix(const uint32_t* keys, int64_t count, int shift, uint32_t prefix,
                             uint32_t* kept) {
    int64_t found = 0, i = 0;
#if ESS_LANES == 16
    for (; i + 16 <= count; i += 16) {
        const __m512i here = _mm512_loadu_si512(keys + i);
        const __mmask16 keeps = _mm512_cmpeq_epi32_mask(_mm512_srli_epi32(here, shift),
                                                        _mm512_set1_epi32(int(prefix)));
        _mm512_storeu_si512(kept + found, _mm512_maskz_compress_epi32(keeps, here));
        found += __builtin_popcount(keeps);
    }
#endif
    for (; i < count; i++) {
        kept[found] = keys[i];
        found += keys[i] >> shift == prefix;
    }
    return found;
}

struct Threshold {
    uint32_t key;
    int64_t equal_count;  // how many of that key belong to the k
};

// The k-th greatest of `keys`; 1 <= k <= count. `spare` is overwritten.
inline Threshold threshold_of(const uint32_t* keys, int64_t count, int64_t k, uint32_t* spare) {
    uint32_t prefix = 0;
    for (int shift : {21, 10, 0}) {
        const uint32_t mask = shift ? kBins - 1 : 1023;
        uint32_t counts[2][kBins] = {};
        int64_t i = 0;
        for (; i + 2 <= count; i += 2) {
            counts[0][keys[i] >> shift & mask]++;
            counts[1][keys[i + 1] >> shift & mask]++;
        }
        if (i < count) counts[0][keys[i] >> shift & mask]++;
        int64_t bin = mask;
        for (;; bin--) {
            const int64_t here = int64_t(counts[0][bin]) + counts[1][bin];
            if (k <= here) break;
            k -= here;
        }
        prefix = prefix << (shift ? 11 : 10) | uint32_t(bin);
        if (shift == 0) break;
        count = keep_prefix(keys, count, shift, prefix, spare);
        keys = spare;
    }
    return {prefix, k};
}

// A value that about k and very likely no fewer logits reach; minus infinity where a sample cannot
// help.
inline float likely_least(const float* logits, int64_t count, int64_t k, const Candidates& room) {
    const double share = double(k) / double(count) * kSample;
    const int64_t rank = int64_t(share + 4 * __builtin_sqrt(share)) + 4;
    if (count < 4 * kSample || rank > kSample / 4) return -__builtin_inff();
    for (int64_t i = 0; i < kSample; i++)
        room.keys[i] = order_of(logits[i * count / kSample]);
    const uint32_t key = threshold_of(room.keys, kSample, rank, room.spare).key;
    if (key == 0xFFFFFFFFu) return -__builtin_inff();
    return value_of(key);
}

// The k positions above the threshold or among the first equal to it.
ESS_LANE void take(const Candidates& kept, int64_t found, Threshold threshold, int64_t k,
                   int32_t* out) {
    int64_t taken = 0, i = 0;
#if ESS_LANES == 16
    const __m512i key = _mm512_set1_epi32(int(threshold.key));
    for (; i + 16 <= found; i += 16) {
        const __m512i here = _mm512_loadu_si512(kept.keys + i);
        uint32_t equal = _mm512_cmpeq_epi32_mask(here, key);
        while (__builtin_popcount(equal) > threshold.equal_count)
            equal ^= 1u << (31 - __builtin_clz(equal));
        threshold.equal_count -= __builtin_popcount(equal);
        const __mmask16 takes = __mmask16(equal) | _mm512_cmpgt_epu32_mask(here, key);
        const int count = __builtin_popcount(takes);
        const __m512i positions = _mm512_loadu_si512(kept.positions + i);
        _mm512_mask_storeu_epi32(out + taken, __mmask16((1u << count) - 1),
                                 _mm512_maskz_compress_epi32(takes, positions));
        taken += count;
    }
#endif
    for (; i < found && taken < k; i++) {
        const bool equal = kept.keys[i] == threshold.key && threshold.equal_count > 0;
        threshold.equal_count -= equal;
        out[taken] = kept.positions[i];
        taken += kept.keys[i] > threshold.key || equal;
    }
}

void top_k(const float* logits, int64_t count, int64_t k, int32_t* out) {
    int64_t taken = 0;
    if (k >= count) {
        for (; taken < count; taken++) out[taken] = int32_t(taken);
        for (; taken < k; taken++) out[taken] = -1;
        return;
    }
    const int64_t room = round_up(count + 16, 16);
    uint32_t* memory = (uint32_t*)scratch(Use::select, 3 * room * 4);
    const Candidates kept{memory, (int32_t*)memory + room, memory + 2 * room};
    const float least = likely_least(logits, count, k, kept);
    int64_t found = keep_from(logits, count, least, kept);
    if (found < k) found = keep_from(logits, count, -__builtin_inff(), kept);
    keys_of(kept.keys, found, kept.keys);
    take(kept, found, threshold_of(kept.keys, found, k, kept.spare), k, out);
}
