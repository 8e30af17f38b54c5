// A stage of a layer, for a few tokens: a list of ops over float32 registers.
//
// A register holds one vector per token. Ops read and write registers; `load` and `store` are the
// only ones that touch the caller's memory. What a token gets depends on no other token: every sum
// grows in the order of its axis in a lane of its own (norms: in one lane per residue, folded at
// the end), whatever the number of tokens, of threads, or of tokens that chose the same expert.
//
// Weights are packed, as words (product.h) or as codes (codes.h). Sums, norms, rotations, routing
// and everything between two products stay in float32.
#pragma once

// What a stage works in: registers, words of the input of a product, sums of its groups, room for
// codes that are written out, and what experts pass on.
struct Bench {
    const Stage& stage;
    const Bound* bound;
    int64_t first, tokens;
    float* const* registers;
    uint32_t* words = nullptr;
    float* sums = nullptr;
    uint32_t* room = nullptr;
    float* wide = nullptr;
    int32_t* chosen = nullptr;
    float* shares = nullptr;

    float* at(int64_t number, int64_t token) const {
        return registers[number] + token * stage.widths[number];
    }
    uint8_t* outside(int64_t number, int64_t token) const {
        return bound[number].base + (first + token) * bound[number].stride;
    }
};

ESS_LANE void load_op(const Bench& b, const Op& op, int64_t t) {
    const uint8_t* from = b.outside(op.from, t);
    float* to = b.at(op.to, t) + op.to_at;
    if (b.bound[op.from].form == Form::bf16)
        for (int64_t i = 0; i < op.in_dim; i++) to[i] = bf16_widen(((const half_any*)from)[i]);
    else
        __builtin_memcpy(to, from, op.in_dim * 4);
}

ESS_LANE void store_op(const Bench& b, const Op& op, int64_t t) {
    const float* from = b.at(op.from, t) + op.from_at;
    uint8_t* to = b.outside(op.to, t);
    if (b.bound[op.to].form == Form::bf16)
        round_values(from, op.in_dim, (half_any*)to);
    else
        __builtin_memcpy(to, from, op.in_dim * 4);
}

// The sum of f(i) over dim, residue by residue.
template <typename Each>
ESS_LANE float sum_over(int64_t dim, const Each& each) {
    float lanes[16] = {};
    const int64_t whole = dim / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        for (int64_t lane = 0; lane < 16; lane++) lanes[lane] += each(i + lane);
    for (int64_t i = whole; i < dim; i++) lanes[i - whole] += each(i);
    for (int64_t width = 8; width; width /= 2)
        for (int64_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

ESS_LANE void norm_op(const Bench& b, const Op& op, int64_t t) {
    const float* from = b.at(op.from, t) + op.from_at;
    float* to = b.at(op.to, t) + op.to_at;
    const float* weight = (const float*)op.weight;
    const float squares = sum_over(op.in_dim, [&](int64_t i) { return from[i] * from[i]; });
    const float factor = 1.0f / __builtin_sqrtf(squares / float(op.in_dim) + op.value);
    for (int64_t i = 0; i < op.in_dim; i++) to[i] = from[i] * factor * weight[i];
}

ESS_LANE void center_op(const Bench& b, const Op& op, int64_t t) {
    const float* from = b.at(op.from, t) + op.from_at;
    float* to = b.at(op.to, t) + op.to_at;
    const float *weight = (const float*)op.weight, *bias = (const float*)op.more;
    const float count = float(op.in_dim);
    const float mean = sum_over(op.in_dim, [&](int64_t i) { return from[i]; }) / count;
    const auto square = [&](int64_t i) { return (from[i] - mean) * (from[i] - mean); };
    const float factor = 1.0f / __builtin_sqrtf(sum_over(op.in_dim, square) / count + op.value);
    for (int64_t i = 0; i < op.in_dim; i++)
        to[i] = (from[i] - mean) * factor * weight[i] + bias[i];
}

// Pairs (2i, 2i + 1), or with out_dim 1 (i, i + dim / 2); cos and sin are bound as 0 and 1.
ESS_LANE void rotate_op(const Bench& b, const Op& op, int64_t t) {
    const float *cos = (const float*)b.outside(0, t), *sin = (const float*)b.outside(1, t);
    const int64_t pairs = op.in_dim / 2;
    for (int64_t head = 0; head < op.count; head++) {
        float* x = b.at(op.to, t) + op.to_at + head * op.to_step;
        for (int64_t i = 0; i < pairs; i++) {
            float &low = x[op.out_dim ? i : 2 * i], &high = x[op.out_dim ? i + pairs : 2 * i + 1];
            const float a = low, c = high;
            low = a * cos[i] - c * sin[i];
            high = c * cos[i] + a * sin[i];
        }
    }
}

// For strides 1, 2, 4, ... below kLanes: which lane a lane meets, and the sign of its own value.
struct Mixing {
    int32_t partner[4][kLanes] = {};
    float sign[4][kLanes] = {};

    constexpr Mixing() {
        for (int turn = 0; turn < 4; turn++)
            for (int lane = 0; lane < kLanes; lane++) {
                partner[turn][lane] = (lane ^ 1 << turn) % kLanes;
                sign[turn][lane] = lane & 1 << turn ? -1.0f : 1.0f;
            }
    }
};
constexpr Mixing kMixing;

ESS_LANE Floats mix(Floats x, int turn) {
    const Ints partner = load<Ints>(kMixing.partner[turn]);
#ifdef __clang__
    Floats met = {};
    for (int64_t lane = 0; lane < kLanes; lane++) met[lane] = x[partner[lane]];
#else
    const Floats met = __builtin_shuffle(x, partner);
#endif
    return multiply_add(load<Floats>(kMixing.sign[turn]), x, met);
}

// Sums to the lower side, differences to the upper; counts are powers of two.
ESS_LANE void pair_up(float* lower, float* upper, int64_t count) {
    for (int64_t i = 0; i < count && count < kLanes; i++) {
        const float low = lower[i], high = upper[i];
        lower[i] = low + high;
        upper[i] = low - high;
    }
    for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
        const Floats low = load<Floats>(lower + i), high = load<Floats>(upper + i);
        store(lower + i, low + high);
        store(upper + i, low - high);
    }
}

ESS_LANE void hadamard_values(float* x, int64_t dim, float factor) {
    int64_t stride = 1;
    if (dim % kLanes == 0) {
        for (int64_t i = 0; i < dim; i += kLanes) {
            Floats some = load<Floats>(x + i);
#pragma GCC unroll 4
            for (int turn = 0; 1 << turn < kLanes; turn++) some = mix(some, turn);
            store(x + i, some);
        }
        stride = kLanes;
    }
    for (; stride < dim; stride *= 2)
        for (int64_t base = 0; base < dim; base += 2 * stride)
            pair_up(x + base, x + base + stride, stride);
    for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

ESS_LANE void hadamard_op(const Bench& b, const Op& op, int64_t t) {
    for (int64_t head = 0; head < op.count; head++)
        hadamard_values(b.at(op.to, t) + op.to_at + head * op.to_step, op.in_dim, op.value);
}

ESS_LANE void gate_values(const float* from, int64_t dim, float* to) {
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats gate = {}, up = {};
        const int64_t room = dim - i < kLanes ? dim - i : kLanes;
        __builtin_memcpy(&gate, from + i, room * 4);
        __builtin_memcpy(&up, from + dim + i, room * 4);
        const Floats magnitude = gate < 0.0f ? gate : -gate;
        const Floats small = exponential(magnitude);
        const Floats sigmoid = (gate < 0.0f ? small : all(1.0f)) / (small + 1.0f);
        const Floats made = gate * sigmoid * up;
        __builtin_memcpy(to + i, &made, room * 4);
    }
}

ESS_LANE void copy_op(const Bench& b, const Op& op, int64_t t) {
    const float* from = b.at(op.from, t) + op.from_at;
    float* to = b.at(op.to, t) + op.to_at;
    for (int64_t head = 0; head < op.count; head++)
        __builtin_memcpy(to + head * op.to_step, from + head * op.from_step, op.in_dim * 4);
}

ESS_LANE void add_op(const Bench& b, const Op& op, int64_t t) {
    const float* from = b.at(op.from, t) + op.from_at;
    float* to = b.at(op.to, t) + op.to_at;
    for (int64_t i = 0; i < op.in_dim; i++) to[i] += from[i];
}

void coded_op(const Bench& b, const Op& op, const Product& p) {
    const int64_t groups = op.in_dim / kGroupInputs, size = p.steps / groups;
    for (int64_t i = 0; i < b.tokens * groups; i++)
        b.sums[i] = group_sum(b.words + i * size, op.half);
    coded_product({p, b.sums, b.room, groups}, b.tokens, op.bits, op.half);
}

void linear_op(const Bench& b, const Op& op) {
    const int64_t steps = word_count(op.in_dim, op.half), width = b.stage.widths[op.to];
    const int64_t words = op.bits ? op.in_dim / kGroupInputs * (op.bits + 1) : steps;
    const int64_t panels = round_up(op.out_dim, kLanes) * words;
    for (int64_t head = 0; head < op.count; head++) {
        for (int64_t t = 0; t < b.tokens; t++)
            to_words(b.at(op.from, t) + op.from_at + head * op.from_step, op.in_dim, op.half,
                     b.words + t * steps);
        const Product made{b.words, (const uint32_t*)op.weight + head * panels, steps, op.out_dim,
                           b.at(op.to, 0) + op.to_at + head * op.to_step, width, op.value};
        if (op.bits)
            coded_op(b, op, made);
        else
            product(made, b.tokens, op.half);
    }
}

// The greatest comes first, of equals the lower place; NaN counts as infinite, so that it is seen.
// What was taken before is marked in `taken`.
ESS_LANE int64_t best_of(const float* scores, const uint8_t* taken, int64_t count) {
    int64_t best = -1;
    float top = 0;
    for (int64_t i = 0; i < count; i++) {
        const float score = scores[i] != scores[i] ? __builtin_inff() : scores[i];
        if (taken[i] || (best >= 0 && !(score > top))) continue;
        best = i, top = score;
    }
    return best;
}

// Groups rank by the sum of their two best experts; the experts of the others are out.
ESS_LANE void limit_groups(const Experts& e, const float* choice, uint8_t* out) {
    const int64_t size = e.expert_count / e.group_count;
    float strength[kExpertsMax];
    uint8_t kept[kExpertsMax] = {};
    for (int64_t g = 0; g < e.group_count; g++) {
        uint8_t taken[kExpertsMax] = {};
        const int64_t first = best_of(choice + g * size, taken, size);
        taken[first] = 1;
        const int64_t second = best_of(choice + g * size, taken, size);
        strength[g] = choice[g * size + first] + choice[g * size + second];
    }
    for (int64_t n = 0; n < e.groups_kept; n++) kept[best_of(strength, kept, e.group_count)] = 1;
    for (int64_t i = 0; i < e.expert_count; i++) out[i] = !kept[i / size];
}

// Ascending experts of one token, and their shares.
ESS_LANE void route(const Experts& e, const float* logits, int32_t* chosen, float* shares) {
    float scores[kExpertsMax], choice[kExpertsMax];
    uint8_t out[kExpertsMax] = {}, picked[kExpertsMax] = {};
    for (int64_t i = 0; i < e.expert_count; i++) {
        scores[i] = 1.0f / (1.0f + float(::exp(double(-logits[i]))));
        choice[i] = scores[i] + e.correction[i];
    }
    if (e.group_count > 1) limit_groups(e, choice, out);
    for (int64_t n = 0; n < e.per_token; n++) {
        const int64_t best = best_of(choice, out, e.expert_count);
        out[best] = picked[best] = 1;
    }
    float sum = 0;
    for (int64_t i = 0, n = 0; i < e.expert_count; i++) {
        if (!picked[i]) continue;
        chosen[n] = int32_t(i);
        shares[n++] = scores[i];
        sum += scores[i];
    }
    for (int64_t n = 0; n < e.per_token; n++)
        shares[n] = (e.is_normed ? shares[n] / (sum + 1e-20f) : shares[n]) * e.scale;
}

// One expert after another, each over the tokens that chose it; a token adds up its own in order.
void experts_op(const Bench& b, const Op& op) {
    const Experts& e = *(const Experts*)op.more;
    const int64_t in_words = word_count(op.in_dim, op.half), mid = word_count(e.inner, op.half);
    const int64_t up_panels = round_up(2 * e.inner, kLanes) * in_words;
    const int64_t down_panels = round_up(op.in_dim, kLanes) * mid;
    for (int64_t t = 0; t < b.tokens; t++)
        route(e, b.at(e.logits, t), b.chosen + t * e.per_token, b.shares + t * e.per_token);
    for (int64_t expert = 0; expert < e.expert_count; expert++) {
        int64_t mine[kStageTokens], count = 0;
        float share[kStageTokens];
        for (int64_t i = 0; i < b.tokens * e.per_token; i++) {
            if (b.chosen[i] != expert) continue;
            mine[count] = i / e.per_token;
            share[count++] = b.shares[i];
        }
        if (count == 0) continue;
        for (int64_t n = 0; n < count; n++)
            to_words(b.at(op.from, mine[n]), op.in_dim, op.half, b.words + n * in_words);
        product({b.words, (const uint32_t*)e.gate_up + expert * up_panels, in_words, 2 * e.inner,
                 b.wide, 2 * e.inner, 1.0f}, count, op.half);
        for (int64_t n = 0; n < count; n++) {
            float* row = b.wide + n * 2 * e.inner;
            gate_values(row, e.inner, row);
            to_words(row, e.inner, op.half, b.words + n * mid);
        }
        product({b.words, (const uint32_t*)e.down + expert * down_panels, mid, op.in_dim, b.wide,
                 op.in_dim, 1.0f}, count, op.half);
        for (int64_t n = 0; n < count; n++) {
            float* to = b.at(op.to, mine[n]);
            for (int64_t i = 0; i < op.in_dim; i++)
                to[i] += share[n] * b.wide[n * op.in_dim + i];
        }
    }
}

void encode_op(const Bench& b, const Op& op, int64_t t) {
    const Encoding& e = *(const Encoding*)op.more;
    uint8_t* to = b.outside(op.to, t);
    ess_codec_encode(&e.strides, (const char*)(b.at(op.from, t) + op.from_at), to,
                     (char*)to + e.scale_at, (char*)to + e.tail_at);
}

void run_op(const Bench& b, const Op& op) {
    if (op.kind == OpKind::linear) return linear_op(b, op);
    if (op.kind == OpKind::experts) return experts_op(b, op);
    for (int64_t t = 0; t < b.tokens; t++) switch (op.kind) {
            case OpKind::load: load_op(b, op, t); break;
            case OpKind::store: store_op(b, op, t); break;
            case OpKind::copy: copy_op(b, op, t); break;
            case OpKind::norm: norm_op(b, op, t); break;
            case OpKind::center: center_op(b, op, t); break;
            case OpKind::rotate: rotate_op(b, op, t); break;
            case OpKind::hadamard: hadamard_op(b, op, t); break;
            case OpKind::gate: gate_values(b.at(op.from, t), op.in_dim, b.at(op.to, t)); break;
            case OpKind::add: add_op(b, op, t); break;
            default: encode_op(b, op, t);
        }
}

// Memory for `tokens` tokens from `at` on: registers, words, what experts pass on.
ESS_LANE uintptr_t lay_out(const Stage& stage, int64_t tokens, uintptr_t at, float** registers,
                           Bench* bench) {
    int64_t words = 0, coded = 0, wide = 0, per_token = 0;
    for (int64_t i = 0; i < stage.op_count; i++) {
        const Op& op = stage.ops[i];
        if (op.in_dim > words) words = op.in_dim;
        if (op.bits && op.in_dim > coded) coded = op.in_dim;
        if (op.kind != OpKind::experts) continue;
        const Experts& e = *(const Experts*)op.more;
        if (e.inner > words) words = e.inner;
        const int64_t most = 2 * e.inner > op.in_dim ? 2 * e.inner : op.in_dim;
        if (most > wide) wide = most;
        if (e.per_token > per_token) per_token = e.per_token;
    }
    const auto take_for = [&](int64_t tokens, int64_t count) {
        const uintptr_t from = at;
        at += round_up(count * tokens * 4, 64);
        return (void*)from;
    };
    const auto take = [&](int64_t count) { return take_for(tokens, count); };
    for (int64_t i = 0; i < stage.register_count; i++)
        registers[i] = (float*)take(stage.widths[i]);
    bench->words = (uint32_t*)take_for(round_up(tokens, kTileRows), words + 1);  // for whole tiles
    bench->sums = (float*)take(coded / kGroupInputs);
    bench->room = (uint32_t*)at;
    const int64_t out = coded && tokens < kWriteOutFrom ? kGroupInputs : coded;  // tile_groups
    at += out * kPanelsTogether * kLanes * 4;
    bench->wide = (float*)take(wide);
    bench->chosen = (int32_t*)take(per_token);
    bench->shares = (float*)take(per_token);
    return at;
}

void stage(const Stage& stage, const Bound* bound, int64_t first, int64_t last) {
    float* registers[kRegistersMax];
    Bench bench{stage, bound, first, last - first, registers};
    const uintptr_t bytes = lay_out(stage, bench.tokens, 0, registers, &bench);
    lay_out(stage, bench.tokens, (uintptr_t)scratch(Use::stage, int64_t(bytes)), registers, &bench);
    for (int64_t i = 0; i < stage.op_count; i++) run_op(bench, stage.ops[i]);
}

// Weights [out, in] of one matrix into panels; from and to are dense.
void pack_panels(const uint8_t* from, int64_t form, int64_t out_dim, int64_t in_dim, bool half,
                 uint32_t* to) {
    const int64_t steps = word_count(in_dim, half), size = form == Form::bf16 ? 2 : 4;
    for (int64_t column = 0; column < out_dim; column += kLanes, to += steps * kLanes)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t lane = 0; lane < kLanes; lane++) {
                const uint8_t* row = from + (column + lane) * in_dim * size;
                const auto one = [&](int64_t i) {
                    return column + lane < out_dim && i < in_dim ? number(row, form, i) : 0.0f;
                };
                to[step * kLanes + lane] =
                    half ? bf16_round(one(2 * step)) | uint32_t(bf16_round(one(2 * step + 1))) << 16
                         : as_bits(one(step));
            }
}
