// Row movers: copy rows of any size that is a multiple of 4 between two matrices of rows.
//
// Rows scattered over gigabytes miss every cache and most address translations, so what limits the
// copy is how many lines are on their way at once, and each instruction spent between two requests.
// Hence:
// - Addresses are resolved block by block, away from the loop that waits for memory; skipped pairs
//   vanish there.
// - Beside each line that it copies, the loop requests one line of the row some 16 KiB ahead, on
//   every side that has a list. One by one, because a burst of requests finds the miss entries
//   taken and is dropped; to the second-level cache, because a request to the first level would
//   hold one of its few miss entries until memory answers.
// - Neighbouring rows without a gap that make up 16 KiB become one span, without requests: the
//   hardware sees the stream and does better alone. Where the whole copy is too large for the
//   caches, spans are stored past them. Single rows never are: a row ends in the middle of a line,
//   and half lines are what streaming stores are bad at.
//
// Addresses are 64-bit everywhere; matrices need no alignment. Where rows of one copy overlap one
// another, in the target or across the sides, the result is unspecified.
#include "rows.h"

#include <algorithm>
#include <cstring>

#include "crew.h"
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ess {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAheadBytes = 16 << 10;
constexpr int64_t kAheadMax = 32;
constexpr int64_t kBlock = 128;
constexpr int64_t kLongSpan = 16 << 10;
constexpr int64_t kPieceBytes = 256 << 10;

struct Span {
    uint8_t* target;
    const uint8_t* source;
    int64_t bytes;
};

// What to request while a span is copied: rows that come later, or null.
struct Ahead {
    const uint8_t* source;
    const uint8_t* target;

    void request(int64_t at) const {
        if (source) __builtin_prefetch(source + at, 0, 2);
        if (target) __builtin_prefetch(target + at, 0, 2);
    }
    void request_row(int64_t bytes) const {
        for (int64_t at = 0; at < bytes; at += kLine) request(at);
        request(bytes - 1);
    }
};

using SpanFunction = void (*)(const Span& span, Ahead ahead);

void copy_portable(const Span& span, Ahead ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        ahead.request(at);
        std::memcpy(target + at, source + at, kLine);
    }
    ahead.request(bytes - 1);
    std::memcpy(target + at, source + at, bytes - at);
}

#if defined(__x86_64__)
#define ESS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define ESS_AVX2 __attribute__((target("avx2")))

inline int64_t to_boundary(const uint8_t* address, int64_t unit) {
    return -reinterpret_cast<uintptr_t>(address) & (unit - 1);
}

ESS_AVX512 inline void part_avx512(uint8_t* target, const uint8_t* source, int64_t bytes) {
    const __mmask64 part = ~0ull >> (kLine - bytes);
    _mm512_mask_storeu_epi8(target, part, _mm512_maskz_loadu_epi8(part, source));
}

ESS_AVX512 void copy_avx512(const Span& span, Ahead ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        ahead.request(at);
        _mm512_storeu_si512(target + at, _mm512_loadu_si512(source + at));
    }
    ahead.request(bytes - 1);
    if (at < bytes) part_avx512(target + at, source + at, bytes - at);
}

// Streaming stores need whole aligned lines: the two ends go the ordinary way.
ESS_AVX512 void stream_avx512(const Span& span, Ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = to_boundary(target, kLine);
    if (at) part_avx512(target, source, at);
    for (; at + kLine <= bytes; at += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at),
                            _mm512_loadu_si512(source + at));
    if (at < bytes) part_avx512(target + at, source + at, bytes - at);
}

ESS_AVX2 inline __m256i load_avx2(const uint8_t* source) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

ESS_AVX2 inline void part_avx2(uint8_t* target, const uint8_t* source, int64_t bytes) {
    const __m256i word = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i part = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(bytes / 4)), word);
    _mm256_maskstore_epi32(reinterpret_cast<int*>(target), part,
                           _mm256_maskload_epi32(reinterpret_cast<const int*>(source), part));
}

ESS_AVX2 void copy_avx2(const Span& span, Ahead ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        ahead.request(at);
        const __m256i low = load_avx2(source + at), high = load_avx2(source + at + 32);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + at), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + at + 32), high);
    }
    ahead.request(bytes - 1);
    for (; at < bytes; at += 32)
        part_avx2(target + at, source + at, std::min<int64_t>(32, bytes - at));
}

ESS_AVX2 void stream_avx2(const Span& span, Ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = to_boundary(target, 32);
    if (at) part_avx2(target, source, at);
    for (; at + 32 <= bytes; at += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), load_avx2(source + at));
    if (at < bytes) part_avx2(target + at, source + at, bytes - at);
}

SpanFunction span_function(bool streamed) {
    switch (isa()) {
        case Isa::avx512: return streamed ? stream_avx512 : copy_avx512;
        case Isa::avx2: return streamed ? stream_avx2 : copy_avx2;
        default: return copy_portable;
    }
}

void finish_streams() { _mm_sfence(); }
#else
SpanFunction span_function(bool) { return copy_portable; }
void finish_streams() {}
#endif

// The spans of rows first .. last - 1, a block at a time. Each block shows `distance` spans more
// than are to be copied now, those of the next block; behind the very last they are empty.
class Block {
public:
    const int64_t distance;

    Block(const RowCopy& copy, int64_t first, int64_t last)
        : distance(std::clamp<int64_t>(kAheadBytes / copy.row_bytes, 2, kAheadMax)),
          copy_(copy), next_(first), last_(last), checked_(first) {}

    const Span& operator[](int64_t i) const { return spans_[i]; }

    Ahead ahead(int64_t i) const {
        const Span& later = spans_[i + distance];
        return {copy_.source.index_bytes ? later.source : nullptr,
                copy_.target.index_bytes ? later.target : nullptr};
    }

    // How many spans to copy now; 0 at the end.
    int64_t refill() {
        std::copy(spans_ + ready_, spans_ + filled_, spans_);
        filled_ -= ready_;
        while (next_ < last_ && filled_ < kBlock + distance) add();
        if (next_ < last_) return ready_ = filled_ - distance;
        std::fill(spans_ + filled_, spans_ + filled_ + distance, Span{nullptr, nullptr, 0});
        return ready_ = filled_;
    }

private:
    void add() {
        int64_t rows = 1;
        if (next_ >= checked_) {
            checked_ = end_of_run(next_);
            if ((checked_ - next_) * copy_.row_bytes >= kLongSpan) rows = checked_ - next_;
        }
        const int64_t from = copy_.source.row(next_), to = copy_.target.row(next_);
        next_ += rows;
        if (from < 0 || to < 0) return;
        spans_[filled_++] = {copy_.target.base + to * copy_.target.stride,
                             copy_.source.base + from * copy_.source.stride,
                             rows * copy_.row_bytes};
    }

    // Behind the last row that follows row i without a gap on both sides.
    int64_t end_of_run(int64_t i) const {
        do ++i;
        while (i < last_ && follows(copy_.source, i) && follows(copy_.target, i));
        return i;
    }

    bool follows(const RowSide& side, int64_t i) const {
        return side.row(i) == side.row(i - 1) + 1 && side.row(i) > 0 &&
               side.stride == copy_.row_bytes;
    }

    const RowCopy copy_;
    int64_t next_;
    const int64_t last_;
    int64_t checked_;  // rows before this one are known to lie in no long run
    int64_t ready_ = 0;
    int64_t filled_ = 0;
    Span spans_[kBlock + 2 * kAheadMax];
};

void copy_range(const RowCopy& copy, bool streamed, int64_t first, int64_t last) {
    const SpanFunction copy_row = span_function(false);
    const SpanFunction copy_long = span_function(streamed);
    Block block(copy, first, last);
    int64_t count = block.refill();
    for (int64_t i = -block.distance; i < 0; ++i) block.ahead(i).request_row(copy.row_bytes);
    for (; count > 0; count = block.refill()) {
        for (int64_t i = 0; i < count; ++i) {
            if (block[i].bytes == copy.row_bytes) copy_row(block[i], block.ahead(i));
            else copy_long(block[i], Ahead{nullptr, nullptr});
        }
    }
    finish_streams();
}

template <typename Index>
bool all_inside(const RowSide& side, int64_t count) {
    const Index* list = static_cast<const Index*>(side.list);
    const uint64_t allowed = static_cast<uint64_t>(side.row_count);
    int64_t outside = 0;
    for (int64_t i = 0; i < count; ++i)
        outside += static_cast<uint64_t>(list[i] + int64_t{1}) > allowed;
    return outside == 0;
}

bool all_inside(const RowSide& side, int64_t count) {
    if (side.index_bytes == 0) return true;
    return side.index_bytes == 4 ? all_inside<int32_t>(side, count)
                                 : all_inside<int64_t>(side, count);
}

}  // namespace

bool find_fault(const RowCopy* copies, int64_t copy_count, Fault* fault) {
    for (int64_t i = 0; i < copy_count; ++i) {
        for (int64_t side = 0; side < 2; ++side) {
            const RowSide& rows = side ? copies[i].target : copies[i].source;
            if (all_inside(rows, copies[i].count)) continue;
            int64_t place = 0;
            while (rows.row(place) >= -1 && rows.row(place) < rows.row_count) ++place;
            *fault = {i, side, place, rows.row(place)};
            return true;
        }
    }
    return false;
}

void copy_rows(const RowCopy& copy, int threads, int64_t stream_above) {
    const bool in_words =
        ((reinterpret_cast<uintptr_t>(copy.target.base) | copy.target.stride) & 3) == 0;
    const bool streamed = in_words && copy.count > stream_above / copy.row_bytes;
    const int64_t rows = std::max<int64_t>(1, kPieceBytes / copy.row_bytes);
    const int64_t pieces = (copy.count + rows - 1) / rows;
    if (threads <= 1 || pieces <= 1) return copy_range(copy, streamed, 0, copy.count);
    run_pieces(threads, pieces, [&](int64_t i) {
        copy_range(copy, streamed, i * rows, std::min((i + 1) * rows, copy.count));
    });
}

}  // namespace ess

// 0: copied. 1: nothing copied, `fault` says why.
ESS_EXPORT int32_t ess_rows_copy(const ess::RowCopy* copy, int32_t threads, int64_t stream_above,
                                 ess::Fault* fault) {
    if (ess::find_fault(copy, 1, fault)) return 1;
    ess::copy_rows(*copy, threads, stream_above);
    return 0;
}

