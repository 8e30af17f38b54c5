// What a decode step needs beside its layers: where its tokens stand, how they are rotated, and
// which token is best. Small work, done for all queries in one call each.
#include <cstring>

#include "native.h"

namespace ess {

// What the layers of a step read about its queries, and where that is written: for each query its
// line of the page tables, and its angles from a table of two halves [turn_count, 2, turn_width].
struct Opening {
    const int32_t* tables;
    int64_t line_count;
    int64_t table_width;
    const int32_t* lines;
    int32_t* table;
    const float* turns;
    int64_t turn_count;
    int64_t turn_width;
    const int32_t* positions;
    float* cos;
    float* sin;
    int64_t query_count;
};

}  // namespace ess

namespace {

constexpr int kLanes = 16;

// The first place of the greatest value; -1 if one of them is no number. Lanes keep the greatest of
// every sixteenth value; which place that was is looked up behind them.
int64_t best(const float* values, int64_t count) {
    float top[kLanes];
    int32_t wrong[kLanes] = {};
    for (int j = 0; j < kLanes; j++) top[j] = values[0];
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int j = 0; j < kLanes; j++) {
            const float value = values[i + j];
            top[j] = value > top[j] ? value : top[j];
            wrong[j] |= value != value;
        }
    for (; i < count; i++) {
        top[0] = values[i] > top[0] ? values[i] : top[0];
        wrong[0] |= values[i] != values[i];
    }
    float greatest = top[0];
    for (int j = 0; j < kLanes; j++) {
        if (wrong[j]) return -1;
        greatest = top[j] > greatest ? top[j] : greatest;
    }
    int64_t at = 0;
    while (values[at] != greatest) at++;
    return at;
}

}  // namespace

// For each query its line, its number among its sequence's queries, where the sequence starts, its
// position, the length that it may select from and its row id: six lists of `query_count` in `out`.
// The counts of the sequences' queries follow their `lines`. Returns 1; or 0 with `out` unfinished
// if a line or a page does not exist.
ESS_EXPORT int32_t ess_places(const int32_t* tables, const int32_t* lengths, const int32_t* lines,
                              int32_t* out, int64_t line_count, int64_t page_max,
                              int64_t sequence_count, int64_t query_count) {
    const int32_t* counts = lines + sequence_count;
    int64_t q = 0;
    for (int64_t s = 0; s < sequence_count; s++) {
        if (lines[s] < 0 || lines[s] >= line_count || lengths[lines[s]] < 0) return 0;
        const int32_t* pages = tables + lines[s] * page_max;
        for (int32_t offset = 0; offset < counts[s]; offset++, q++) {
            const int32_t start = lengths[lines[s]], position = start + offset;
            if (q >= query_count || position / 64 >= page_max || pages[position / 64] < 0) return 0;
            const int32_t row = pages[position / 64] * 64 + position % 64;
            const int32_t said[] = {lines[s], offset, start, position, position + 1, row};
            for (int64_t i = 0; i < 6; i++) out[i * query_count + q] = said[i];
        }
    }
    return q == query_count;
}

// Rows of a table of two halves [length, 2, width], each half [count, width] apart. Returns 1; or 0
// with `cos` and `sin` unfinished if the table lacks a position.
ESS_EXPORT int32_t ess_turns(const float* table, const int32_t* positions, float* cos, float* sin,
                             int64_t length, int64_t width, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (positions[i] < 0 || positions[i] >= length) return 0;
        const float* row = table + positions[i] * 2 * width;
        std::memcpy(cos + i * width, row, width * sizeof(float));
        std::memcpy(sin + i * width, row + width, width * sizeof(float));
    }
    return 1;
}

// 0: a line that is not there; 1: a position that has no angles, and some are not written; 2: done.
ESS_EXPORT int32_t ess_open(const ess::Opening* opening) {
    const ess::Opening& o = *opening;
    for (int64_t q = 0; q < o.query_count; q++) {
        if (o.lines[q] < 0 || o.lines[q] >= o.line_count) return 0;
        std::memcpy(o.table + q * o.table_width, o.tables + o.lines[q] * o.table_width,
                    o.table_width * sizeof(int32_t));
    }
    return 1 + ess_turns(o.turns, o.positions, o.cos, o.sin, o.turn_count, o.turn_width,
                         o.query_count);
}

// Rows of a table [row_count, width] of bf16 or, `is_wide`, float32, as float32. Returns 1; or 0
// with `out` unfinished if a row does not exist.
ESS_EXPORT int32_t ess_embed(const uint8_t* table, const int64_t* ids, float* out, int64_t is_wide,
                             int64_t row_count, int64_t width, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= row_count) return 0;
        float* to = out + i * width;
        if (is_wide) {
            std::memcpy(to, table + ids[i] * width * 4, width * 4);
            continue;
        }
        const uint16_t* from = (const uint16_t*)table + ids[i] * width;
        for (int64_t j = 0; j < width; j++) {
            const uint32_t bits = uint32_t(from[j]) << 16;
            std::memcpy(to + j, &bits, 4);
        }
    }
    return 1;
}

// For each line of logits the first place of the greatest, or -1 if one is no number.
ESS_EXPORT void ess_best(const float* logits, int64_t* out, int64_t count, int64_t width,
                         int64_t stride) {
    for (int64_t i = 0; i < count; i++) out[i] = best(logits + i * stride, width);
}
