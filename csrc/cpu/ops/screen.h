// The exact top-k of a run without the exact logits of every key.
//
// Contract: what `index` and `top_k` give for each query of the run, bit by bit, in memory that
// does not grow with the context.
//
// Queries and keys are rounded to eight bits, of which a vector multiplies twice as many at once as
// of bf16. With q = q' + dq, k = k' + dk and relu of slope g in 0..1, a logit is off by at most
//   |sum w g (q.k - q'.k')| = |(sum w g dq).k + (sum w g q').dk| <= A |k| + B |dk|,
// where A and B are the greatest lengths that sums of some heads' w dq and w q' can have; for
// g >= 0 the squared length, sum g g (v.v), is at most the sum of the products v.v that are
// positive. A grows by what float32 sums may be off, here and in `index`: far above their number of
// terms in units of 2^-24. So every key has a lower and an upper bound, and a key is out as soon as
// k others have lower bounds above its upper one.
//
// What is not out is kept in a list by position. A list that is full is cut down by its bounds; if
// that does not help (equal keys, NaN), and at the end, the logits of those that bounds cannot tell
// apart are computed exactly, with the products of `index`, and compared, ties to the lower
// position. Dropping them midway is sound: what is dropped loses against k keys that stay. Bounds
// that are no numbers are taken as infinite, so a broken key or query costs time only.
#pragma once

constexpr int64_t kSlackBits = 14;  // A grows by 2^-14 of sum |w| |q|
constexpr int64_t kScreenDimMax = 256;

// A list of candidates of one query, ascending by position.
struct Listed {
    int32_t* positions;
    float *lower, *upper;  // equal where the logit itself is known
};

struct Screen {
    int64_t spread, steps, panel, per_query, room;
    uint32_t* packed;  // [vector, step, lane], four numbers each
    float* weights;    // as in IndexWork
    int32_t* bias;     // [vector, lane]: keys are stored plus 128, this takes it off
    float *slope_key, *slope_error, *floor;  // of a query: A, B, and what an upper bound must reach
    int64_t* counts;
    int32_t* positions;
    float *lower, *upper;
    uint32_t *order, *spare;
    int32_t* open;   // places in a list whose logits are to be computed
    uint16_t* sure;  // a bit for each place in a list: selected, whatever its logit
    float* plain;   // the keys of a page
    uint8_t* keys;  // in eight bits, plus 128
    float *factors, *lengths, *errors;  // of keys
    float* vectors;  // of a query, by head: w dq, then w q'
    uint8_t* gathered;
    Floats* begun;
    float* logits;  // [query, key] of a page

    Screen(const Index& call, int64_t query_count, int64_t k)
        : spread(spread_of(call.head_count, call.key_dim / 4)), steps(call.key_dim / 4 / spread),
          panel(steps * kLanes), per_query(round_up(call.head_count * spread, kLanes) / kLanes),
          room(round_up(6 * k < 1024 ? 1024 : 6 * k, 64) + kPageKeys + kLanes) {
        const uintptr_t bytes = carve(0, call, query_count);
        carve((uintptr_t)scratch(Use::screen, int64_t(bytes)), call, query_count);
    }

    Listed list(int64_t query) const {
        return {positions + query * room, lower + query * room, upper + query * room};
    }

private:
    uintptr_t carve(uintptr_t at, const Index& call, int64_t query_count) {
        const int64_t vectors_count = query_count * per_query, dim = call.key_dim;
        lay(at, packed, vectors_count * panel);
        lay(at, weights, vectors_count * kLanes);
        lay(at, bias, vectors_count * kLanes);
        for (float** each : {&slope_key, &slope_error, &floor}) lay(at, *each, query_count);
        lay(at, counts, query_count);
        lay(at, positions, query_count * room);
        for (float** each : {&lower, &upper}) lay(at, *each, query_count * room + kLanes);
        for (uint32_t** each : {&order, &spare}) lay(at, *each, room + kLanes);
        lay(at, open, room + kLanes);
        lay(at, sure, room / kLanes + 1);
        lay(at, plain, kPageKeys * dim);
        lay(at, keys, kPageKeys * dim);
        for (float** each : {&factors, &lengths, &errors}) lay(at, *each, kPageKeys);
        lay(at, vectors, 2 * call.head_count * dim);
        lay(at, gathered, kPageKeys * (4 * dim + 4));
        lay(at, begun, kPageKeys);
        lay(at, logits, query_count * kPageKeys);
        return at;
    }
};

ESS_LANE __m512i lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Of `count` things in vectors of 16: those from `at` on that are there.
ESS_LANE __mmask16 there_from(int64_t at, int64_t count) {
    const int64_t rest = count - at;
    return rest >= kLanes ? 0xFFFF : rest <= 0 ? 0 : __mmask16((1u << rest) - 1);
}

ESS_LANE float sum_lanes(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

// The greatest length that a sum of some of `count` vectors may have.
ESS_LANE float longest_sum(const float* vectors, int64_t count, int64_t dim) {
    float squares = 0;
    for (int64_t a = 0; a < count; a++)
        for (int64_t b = 0; b <= a; b++) {
            Floats sum = {};
            for (int64_t i = 0; i < dim; i += kLanes)
                sum = multiply_add(load<Floats>(vectors + a * dim + i),
                                   load<Floats>(vectors + b * dim + i), sum);
            const float product = sum_lanes(sum) * (a == b ? 1.0f : 2.0f);
            squares += product > 0 || product != product ? product : 0.0f;
        }
    return __builtin_sqrtf(squares);
}

ESS_LANE Floats rounded(Floats x, float factor) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtps_epi32((__m512)x)) * factor;
}

// One head in eight bits; returns the factor, and the length of the head.
ESS_LANE float round_head(const Index& call, const uint8_t* head, float weight, int8_t* bytes,
                          float* errors, float* values, float* length) {
    const int64_t dim = call.key_dim;
    for (int64_t i = 0; i < dim; i++) values[i] = number(head, call.query_form, i);
    Floats squares = {};
    __m512 greatest = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += kLanes) {
        const Floats x = load<Floats>(values + i);
        squares = multiply_add(x, x, squares);
        greatest = _mm512_max_ps(greatest, _mm512_abs_ps((__m512)x));
    }
    const float top = _mm512_reduce_max_ps(greatest), factor = top / 127.0f;
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int64_t i = 0; i < dim; i += kLanes) {
        const Floats x = load<Floats>(values + i), near = rounded(x * inverse, factor);
        _mm_storeu_si128((__m128i*)(bytes + i),
                         _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)(x * inverse))));
        store(errors + i, (x - near) * weight);
        store(values + i, near * weight);
    }
    *length = __builtin_sqrtf(sum_lanes(squares));
    return factor;
}

ESS_LANE void pack_rounded(const Screen& screen, int64_t query, int64_t head, const int8_t* bytes,
                           float weight) {
    const int64_t per_vector = kLanes / screen.spread;
    const int64_t vector = query * screen.per_query + head / per_vector;
    const int64_t lane = head % per_vector * screen.spread;
    for (int64_t part = 0; part < screen.spread; part++) {
        int32_t sum = 0;
        for (int64_t step = 0; step < screen.steps; step++) {
            const int8_t* from = bytes + 4 * (step * screen.spread + part);
            for (int64_t i = 0; i < 4; i++) sum += from[i];
            __builtin_memcpy(screen.packed + vector * screen.panel + step * kLanes + lane + part,
                             from, 4);
        }
        screen.bias[vector * kLanes + lane + part] = -128 * sum;
    }
    for (int64_t at = 0; at < kLanes; at++)
        if (head_of(at, screen.spread) == head % per_vector)
            screen.weights[vector * kLanes + at] = weight;
}

ESS_LANE void pack_screen(const Index& call, const Run& run, const Screen& screen) {
    const int64_t vectors = run.count * screen.per_query, dim = call.key_dim;
    __builtin_memset(screen.packed, 0, vectors * screen.panel * 4);
    __builtin_memset(screen.weights, 0, vectors * kLanes * 4);
    __builtin_memset(screen.bias, 0, vectors * kLanes * 4);
    for (int64_t i = 0; i < run.count; i++) {
        const int64_t query = run.first + i;
        float all_lengths = 0, *errors = screen.vectors, *values = errors + call.head_count * dim;
        for (int64_t head = 0; head < call.head_count; head++) {
            int8_t bytes[kScreenDimMax];
            float length;
            const float weight = call.weights[query * call.head_count + head];
            const uint8_t* from =
                call.queries + query * call.query_stride + head * call.head_stride;
            const float factor = round_head(call, from, weight, bytes, errors + head * dim,
                                            values + head * dim, &length);
            pack_rounded(screen, i, head, bytes, weight * factor);
            all_lengths += (weight < 0 ? -weight : weight) * length;
        }
        screen.slope_key[i] = longest_sum(errors, call.head_count, dim) +
                              all_lengths / float(1 << kSlackBits);
        screen.slope_error[i] = longest_sum(values, call.head_count, dim);
        screen.floor[i] = -__builtin_inff();
        screen.counts[i] = 0;
    }
}

// A page of keys in eight bits, with what each is worth, how long it is and how far it is off.
ESS_LANE void round_page(const Index& call, const uint8_t* page, const Screen& screen) {
    const int64_t dim = call.key_dim;
    const float* values = (const float*)page;
    const float_any* scales = nullptr;
    if (call.key_form != Form::f32) {
        ESS_DECODE_GROUP<false>(page, 1.0f, kPageKeys * dim, (char*)screen.plain);
        values = screen.plain;
        scales = (const float_any*)(page + kPageKeys * dim);
    }
    for (int64_t key = 0; key < kPageKeys; key++, values += dim) {
        __m512 greatest = _mm512_setzero_ps();
        for (int64_t i = 0; i < dim; i += kLanes)
            greatest = _mm512_max_ps(greatest, _mm512_abs_ps(_mm512_loadu_ps(values + i)));
        const float top = _mm512_reduce_max_ps(greatest);
        const float factor = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
        Floats squares = {}, errors = {};
        for (int64_t i = 0; i < dim; i += kLanes) {
            const Floats value = load<Floats>(values + i);
            const __m512i whole = _mm512_cvtps_epi32((__m512)(value * inverse));
            const Floats off = value - (Floats)_mm512_cvtepi32_ps(whole) * factor;
            squares = multiply_add(value, value, squares);
            errors = multiply_add(off, off, errors);
            const __m128i bytes = _mm512_cvtsepi32_epi8(whole);
            _mm_storeu_si128((__m128i*)(screen.keys + key * dim + i),
                             _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
        }
        const float scale = scales ? scales[key] : 1.0f, size = scale < 0 ? -scale : scale;
        screen.factors[key] = factor * scale;
        screen.lengths[key] = __builtin_sqrtf(sum_lanes(squares)) * size;
        screen.errors[key] = __builtin_sqrtf(sum_lanes(errors)) * size;
    }
}

// sums[key][vector] += keys, plus 128, times the rounded queries, four products a lane and step.
template <int spread, int vectors>
ESS_LANE void multiply_bytes(const Screen& screen, const uint32_t* left, const uint32_t* right,
                             Ints (&sums)[kIndexKeys][vectors]) {
    const int64_t words = screen.steps * spread;
    for (int64_t step = 0; step < screen.steps; step++, left += spread, right += kLanes) {
        Ints columns[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) columns[v] = load<Ints>(right + v * screen.panel);
#pragma GCC unroll 16
        for (int row = 0; row < kIndexKeys; row++) {
            const Ints word = repeat<spread>(left + row * words);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                sums[row][v] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[row][v], (__m512i)word,
                                                         (__m512i)columns[v]);
        }
    }
}

template <int spread, int vectors>
ESS_LANE void screen_vectors(const Screen& screen, int64_t vector) {
    const uint32_t* keys = (const uint32_t*)screen.keys;
    for (int64_t key = 0; key < kPageKeys; key += kIndexKeys) {
        Ints sums[kIndexKeys][vectors] = {};
        multiply_bytes<spread>(screen, keys + key * screen.steps * spread,
                               screen.packed + vector * screen.panel, sums);
        for (int v = 0; v < vectors; v++) {
            const Ints bias = load<Ints>(screen.bias + (vector + v) * kLanes);
            Floats mine[kIndexKeys];
            for (int64_t i = 0; i < kIndexKeys; i++)
                mine[i] = (Floats)_mm512_cvtepi32_ps((__m512i)(sums[i][v] + bias));
            weigh<spread>(screen, vector + v, key, mine);
        }
    }
}

template <int spread>
ESS_LANE void screen_page(const Screen& screen, int64_t vectors) {
    int64_t vector = 0;
    for (; vector + 3 <= vectors; vector += 3) screen_vectors<spread, 3>(screen, vector);
    if (vector + 2 == vectors) screen_vectors<spread, 2>(screen, vector);
    if (vector + 1 == vectors) screen_vectors<spread, 1>(screen, vector);
}

template <bool half, int spread>
ESS_LANE void index_query(const IndexWork& work, const uint32_t* keys, int64_t query) {
    for (int64_t i = 0; i < work.per_query; i++) {
        const int64_t vector = query * work.per_query + i;
        index_vectors<half, spread, 1>(work, keys, vector, {});
    }
}

// The logits of listed keys of one query, some at a time, as `index` computes them.
template <bool half, int spread>
void score_open(const Index& call, const Run& run, const IndexWork& work, const Screen& screen,
                int64_t query, int64_t open_count) {
    const Listed list = screen.list(query);
    const int32_t* table = call.table + run.longest * call.table_stride;
    const bool is_fp8 = call.key_form == Form::fp8;
    const int64_t bytes = call.key_dim * (is_fp8 ? 1 : 4);
    float scales[kPageKeys];
    for (int64_t first = 0; first < open_count; first += kPageKeys) {
        const int64_t rest = open_count - first, count = rest < kPageKeys ? rest : kPageKeys;
        for (int64_t i = 0; i < count; i++) {
            const int64_t position = list.positions[screen.open[first + i]];
            const uint8_t* page = call.pages.base + table[position / 64] * call.pages.stride;
            __builtin_memcpy(screen.gathered + i * bytes, page + position % 64 * bytes, bytes);
            if (is_fp8)
                __builtin_memcpy(scales + i, page + kPageKeys * bytes + position % 64 * 4, 4);
        }
        const uint32_t* keys = page_words<half>(call, screen.gathered, work.keys);
        index_query<half, spread>(work, keys, query);
        for (int64_t i = 0; i < count; i++) {
            const float logit = work.logits[query * kPageKeys + i];
            const int64_t place = screen.open[first + i];
            list.lower[place] = list.upper[place] = is_fp8 ? logit * scales[i] : logit;
        }
    }
}

template <bool half>
void score(const Index& call, const Run& run, const IndexWork& work, const Screen& screen,
           int64_t query, int64_t open_count) {
    if (work.spread == 4) return score_open<half, 4>(call, run, work, screen, query, open_count);
    if (work.spread == 2) return score_open<half, 2>(call, run, work, screen, query, open_count);
    score_open<half, 1>(call, run, work, screen, query, open_count);
}

// Keeps the places of a list that `keeps` names, 16 at a time.
template <typename Keeps>
ESS_LANE void keep_listed(const Screen& screen, int64_t query, const Keeps& keeps) {
    const Listed list = screen.list(query);
    const int64_t count = screen.counts[query];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        const __m512 lower = _mm512_loadu_ps(list.lower + i);
        const __m512 upper = _mm512_loadu_ps(list.upper + i);
        const __m512i position = _mm512_loadu_si512(list.positions + i);
        const __mmask16 there = there_from(i, count);
        const __mmask16 some = there & keeps(i, lower, upper);
        _mm512_storeu_ps(list.lower + kept, _mm512_maskz_compress_ps(some, lower));
        _mm512_storeu_ps(list.upper + kept, _mm512_maskz_compress_ps(some, upper));
        _mm512_storeu_si512(list.positions + kept, _mm512_maskz_compress_epi32(some, position));
        kept += __builtin_popcount(some);
    }
    screen.counts[query] = kept;
}

// As `order_of`, 16 at a time.
ESS_LANE __m512i orders_of(__m512 logits) {
    const __m512i bits = _mm512_castps_si512(_mm512_add_ps(logits, _mm512_setzero_ps()));
    const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
    return _mm512_mask_mov_epi32(_mm512_xor_si512(bits, flip),
                                 _mm512_cmp_ps_mask(logits, logits, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(-1));
}

ESS_LANE void list_orders(const float* logits, int64_t count, uint32_t* orders) {
    for (int64_t i = 0; i < count; i += kLanes)
        _mm512_storeu_si512(orders + i, orders_of(_mm512_loadu_ps(logits + i)));
}

// Takes out whose upper bound k lower bounds are above.
ESS_LANE void cut_down(const Screen& screen, int64_t query, int64_t k) {
    const int64_t count = screen.counts[query];
    if (count <= k) return;
    list_orders(screen.list(query).lower, count, screen.order);
    const float floor = value_of(threshold_of(screen.order, count, k, screen.spare).key);
    screen.floor[query] = floor;
    keep_listed(screen, query, [&](int64_t, __m512, __m512 upper) {
        return _mm512_cmp_ps_mask(upper, _mm512_set1_ps(floor), _CMP_NLT_UQ);
    });
}

// Leaves the k that a query selects, of those listed.
template <bool half>
void settle(const Index& call, const Run& run, const IndexWork& work, const Screen& screen,
            int64_t query, int64_t k) {
    cut_down(screen, query, k);
    const Listed list = screen.list(query);
    const int64_t count = screen.counts[query];
    if (count <= k) return;
    list_orders(list.upper, count, screen.order);
    const uint32_t next = threshold_of(screen.order, count, k + 1, screen.spare).key;
    const __m512i rivals = _mm512_set1_epi32(int32_t(next));
    int64_t open_count = 0, sure_count = 0, others = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        const __m512 lower = _mm512_loadu_ps(list.lower + i);
        const __m512 upper = _mm512_loadu_ps(list.upper + i);
        const __mmask16 there = there_from(i, count);
        const __mmask16 sure = there & _mm512_cmpgt_epu32_mask(orders_of(lower), rivals);
        const __mmask16 open = there & ~sure & _mm512_cmp_ps_mask(lower, upper, _CMP_NEQ_UQ);
        screen.sure[i / kLanes] = sure;
        sure_count += __builtin_popcount(sure);
        const __m512i place = _mm512_add_epi32(_mm512_set1_epi32(int32_t(i)), lane_numbers());
        _mm512_storeu_si512(screen.open + open_count, _mm512_maskz_compress_epi32(open, place));
        open_count += __builtin_popcount(open);
    }
    score<half>(call, run, work, screen, query, open_count);
    for (int64_t i = 0; i < count; i += kLanes) {
        const __mmask16 there = there_from(i, count);
        const __mmask16 other = there & ~screen.sure[i / kLanes];
        const __m512i order = orders_of(_mm512_loadu_ps(list.lower + i));
        _mm512_storeu_si512(screen.order + others, _mm512_maskz_compress_epi32(other, order));
        others += __builtin_popcount(other);
    }
    Threshold last{0xFFFFFFFFu, 0};
    const bool has_room = sure_count < k;
    if (has_room) last = threshold_of(screen.order, others, k - sure_count, screen.spare);
    const __m512i least = _mm512_set1_epi32(int32_t(last.key));
    keep_listed(screen, query, [&](int64_t i, __m512 lower, __m512) {
        const __mmask16 sure = screen.sure[i / kLanes];
        const __m512i order = orders_of(lower);
        const __mmask16 there = there_from(i, count);
        uint32_t equal = there & ~sure & _mm512_cmpeq_epi32_mask(order, least);
        while (__builtin_popcount(equal) > last.equal_count)
            equal ^= 1u << (31 - __builtin_clz(equal));
        last.equal_count -= __builtin_popcount(equal);
        const __mmask16 above = has_room ? _mm512_cmpgt_epu32_mask(order, least) : __mmask16(0);
        return __mmask16(sure | above | equal);
    });
}

// Lists the keys of a page whose upper bounds reach the floor.
ESS_LANE void list_page(const Screen& screen, int64_t query, int64_t first, int64_t length) {
    const Listed list = screen.list(query);
    const float* logits = screen.logits + query * kPageKeys;
    const Floats a = all(screen.slope_key[query] * 1.001f);
    const Floats b = all(screen.slope_error[query] * 1.001f);
    const __m512 floor = _mm512_set1_ps(screen.floor[query]), most = _mm512_set1_ps(3e38f);
    const __m512 infinite = _mm512_set1_ps(__builtin_inff());
    int64_t count = screen.counts[query];
    for (int64_t i = 0; i < kPageKeys; i += kLanes) {
        const Floats about = load<Floats>(logits + i) * load<Floats>(screen.factors + i);
        const Floats off = a * load<Floats>(screen.lengths + i) +
                           (b * load<Floats>(screen.errors + i) + all(1e-30f));
        __m512 lower = (__m512)(about - off), upper = (__m512)(about + off);
        const __mmask16 sound =
            _mm512_cmp_ps_mask((__m512)off, most, _CMP_LT_OQ) &
            _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)about), most, _CMP_LT_OQ);
        lower = _mm512_mask_mov_ps(_mm512_sub_ps(_mm512_setzero_ps(), infinite), sound, lower);
        upper = _mm512_mask_mov_ps(infinite, sound, upper);
        const __mmask16 there = there_from(first + i, length);
        const __mmask16 kept = there & _mm512_cmp_ps_mask(upper, floor, _CMP_NLT_UQ);
        if (!kept) continue;
        const __m512i position =
            _mm512_add_epi32(_mm512_set1_epi32(int32_t(first + i)), lane_numbers());
        _mm512_storeu_ps(list.lower + count, _mm512_maskz_compress_ps(kept, lower));
        _mm512_storeu_ps(list.upper + count, _mm512_maskz_compress_ps(kept, upper));
        _mm512_storeu_si512(list.positions + count, _mm512_maskz_compress_epi32(kept, position));
        count += __builtin_popcount(kept);
    }
    screen.counts[query] = count;
}

template <bool half>
void select_in(const Index& call, const Run& run, int64_t k, int32_t* out) {
    const Screen screen(call, run.count, k);
    const IndexWork work(call, run.count, half);
    pack_screen(call, run, screen);
    pack_run<half>(call, run, work);
    const int32_t* table = call.table + run.longest * call.table_stride;
    const int64_t longest = call.lengths[run.longest], vectors = run.count * screen.per_query;
    for (int64_t first = 0; first < longest; first += kPageKeys) {
        round_page(call, call.pages.base + table[first / kPageKeys] * call.pages.stride, screen);
        if (screen.spread == 4)
            screen_page<4>(screen, vectors);
        else if (screen.spread == 2)
            screen_page<2>(screen, vectors);
        else
            screen_page<1>(screen, vectors);
        for (int64_t i = 0; i < run.count; i++) {
            list_page(screen, i, first, call.lengths[run.first + i]);
            if (screen.counts[i] + kPageKeys + kLanes <= screen.room) continue;
            cut_down(screen, i, k);
            if (2 * screen.counts[i] > screen.room) settle<half>(call, run, work, screen, i, k);
        }
    }
    for (int64_t i = 0; i < run.count; i++, out += k) {
        settle<half>(call, run, work, screen, i, k);
        for (int64_t n = 0; n < k; n++)
            out[n] = n < screen.counts[i] ? screen.list(i).positions[n] : -1;
    }
}

void select(const Index& call, const Run& run, int64_t k, int32_t* out) {
    if (is_half(call)) return select_in<true>(call, run, k, out);
    select_in<false>(call, run, k, out);
}
