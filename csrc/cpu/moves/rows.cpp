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
//   hold one of its few miss entries until memory answers. Not every machine likes that: which way
//   a gather goes is a row of ways.h.
// - Neighbouring rows without a gap that make up 16 KiB become one span, without requests: the
//   hardware sees the stream and does better alone. Where the whole copy is too large for the
//   caches, spans are stored past them. Single rows never are: a row ends in the middle of a line,
//   and half lines are what streaming stores are bad at. Rows that go to neighbouring places can
//   meet in the first-level cache first and leave it in whole lines, which spares the read of the
//   target that an ordinary store begins with (`Stage`).
//
// Addresses are 64-bit everywhere; matrices need no alignment. Where rows of one copy overlap one
// another, in the target or across the sides, the result is unspecified.
#include "rows.h"

#include <algorithm>
#include <cstring>

#include "../crew.h"
#include "../native.h"
#include "ways.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ess {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAheadMax = 96;
constexpr int64_t kBlock = 128;
constexpr int64_t kLongSpan = 16 << 10;
constexpr int64_t kPieceBytes = 256 << 10;
constexpr int64_t kThreadBytes = 512 << 10;  // copied in the time that waking a helper takes
constexpr int64_t kStageBytes = 8 << 10;
constexpr int64_t kStagedRowMax = 4 << 10;

struct Span {
    uint8_t* target;
    const uint8_t* source;
    int64_t bytes;
};

template <Hint hint>
__attribute__((always_inline)) inline void request_line(const uint8_t* address) {
    if constexpr (hint == Hint::first_level) __builtin_prefetch(address, 0, 3);
    if constexpr (hint == Hint::second_level) __builtin_prefetch(address, 0, 2);
}

// What to request while a span is copied: rows that come later, or null.
struct Ahead {
    const uint8_t* source;
    const uint8_t* target;

    template <Hint hint>
    __attribute__((always_inline)) void request(int64_t at) const {
        if (hint == Hint::none) return;
        if (source) request_line<hint>(source + at);
        if (target) request_line<hint>(target + at);
    }
    void request_row(int64_t bytes) const {
        for (int64_t at = 0; at < bytes; at += kLine) request<Hint::second_level>(at);
        request<Hint::second_level>(bytes - 1);
    }
};

using SpanFunction = void (*)(const Span& span, Ahead ahead);

template <Hint hint>
void copy_portable(const Span& span, Ahead ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        ahead.request<hint>(at);
        std::memcpy(target + at, source + at, kLine);
    }
    ahead.request<hint>(bytes - 1);
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

template <Hint hint>
ESS_AVX512 void copy_avx512(const Span& span, Ahead ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        ahead.request<hint>(at);
        _mm512_storeu_si512(target + at, _mm512_loadu_si512(source + at));
    }
    ahead.request<hint>(bytes - 1);
    if (at < bytes) part_avx512(target + at, source + at, bytes - at);
}

// Streaming stores need whole aligned lines: the two ends go the ordinary way.
ESS_AVX512 void stream_avx512(const Span& span, Ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = std::min(to_boundary(target, kLine), bytes);
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

template <Hint hint>
ESS_AVX2 void copy_avx2(const Span& span, Ahead ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        ahead.request<hint>(at);
        const __m256i low = load_avx2(source + at), high = load_avx2(source + at + 32);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + at), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + at + 32), high);
    }
    ahead.request<hint>(bytes - 1);
    for (; at < bytes; at += 32)
        part_avx2(target + at, source + at, std::min<int64_t>(32, bytes - at));
}

ESS_AVX2 void stream_avx2(const Span& span, Ahead) {
    const auto [target, source, bytes] = span;
    int64_t at = std::min(to_boundary(target, 32), bytes);
    if (at) part_avx2(target, source, at);
    for (; at + 32 <= bytes; at += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), load_avx2(source + at));
    if (at < bytes) part_avx2(target + at, source + at, bytes - at);
}

template <Hint hint>
SpanFunction copier() {
    switch (isa()) {
        case Isa::avx512: return copy_avx512<hint>;
        case Isa::avx2: return copy_avx2<hint>;
        default: return copy_portable<hint>;
    }
}

SpanFunction streamer() {
    switch (isa()) {
        case Isa::avx512: return stream_avx512;
        case Isa::avx2: return stream_avx2;
        default: return copy_portable<Hint::none>;
    }
}

void finish_streams() { _mm_sfence(); }
#else
template <Hint hint>
SpanFunction copier() {
    return copy_portable<hint>;
}
SpanFunction streamer() { return copy_portable<Hint::none>; }
void finish_streams() {}
#endif

SpanFunction copier(Hint hint) {
    switch (hint) {
        case Hint::first_level: return copier<Hint::first_level>();
        case Hint::second_level: return copier<Hint::second_level>();
        default: return copier<Hint::none>();
    }
}

// The spans of rows first .. last - 1, a block at a time. Each block shows `distance` spans more
// than are to be copied now, those of the next block; behind the very last they are empty.
class Block {
public:
    const int64_t distance;

    Block(const RowCopy& copy, const Way& way, int64_t first, int64_t last)
        : distance(std::clamp<int64_t>(way.ahead_bytes / copy.row_bytes, 2, kAheadMax)),
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

// Spans on their way to places that lie side by side. They are put together in the first-level
// cache as they will lie in memory, from a whole line of it on, and whole lines are streamed there;
// a span that goes elsewhere ends the line.
class Stage {
public:
    void add(const Span& span, SpanFunction copy, Ahead ahead) {
        if (span.target != line_ + filled_) begin(span.target);
        copy({room_ + filled_, span.source, span.bytes}, ahead);
        filled_ += span.bytes;
        if (filled_ >= kStageBytes) send_lines();
    }

    void send_all() {
        if (filled_ > sent_) stream_({line_ + sent_, room_ + sent_, filled_ - sent_}, {});
        sent_ = filled_;
    }

private:
    void begin(uint8_t* target) {
        send_all();
        sent_ = filled_ = reinterpret_cast<uintptr_t>(target) & (kLine - 1);
        line_ = target - sent_;
    }

    // What belongs to a line that is not full waits at the room's beginning.
    void send_lines() {
        const int64_t whole = filled_ / kLine * kLine;
        stream_({line_ + sent_, room_ + sent_, whole - sent_}, {});
        std::memcpy(room_, room_ + whole, filled_ - whole);
        line_ += whole;
        filled_ -= whole;
        sent_ = 0;
    }

    const SpanFunction stream_ = streamer();
    uint8_t* line_ = nullptr;  // where room_[0] belongs
    int64_t sent_ = 0;
    int64_t filled_ = 0;
    alignas(kLine) uint8_t room_[kStageBytes + kStagedRowMax + kLine];
};

// `put` gets each row's span, `put_run` each longer one.
template <typename Put, typename PutRun>
void copy_spans(const RowCopy& copy, const Way& way, int64_t first, int64_t last, const Put& put,
                const PutRun& put_run) {
    Block block(copy, way, first, last);
    int64_t count = block.refill();
    for (int64_t i = -block.distance; i < 0 && way.hint != Hint::none; ++i)
        block.ahead(i).request_row(copy.row_bytes);
    for (; count > 0; count = block.refill()) {
        for (int64_t i = 0; i < count; ++i) {
            if (block[i].bytes == copy.row_bytes) put(block[i], block.ahead(i));
            else put_run(block[i], Ahead{nullptr, nullptr});
        }
    }
}

void copy_staged(const RowCopy& copy, const Way& way, int64_t first, int64_t last) {
    const SpanFunction copy_row = copier(way.hint);
    Stage stage;
    const auto put = [&](const Span& span, Ahead ahead) { stage.add(span, copy_row, ahead); };
    copy_spans(copy, way, first, last, put, streamer());
    stage.send_all();
}

template <typename Index>
bool all_inside(const RowSide& side, int64_t count) {
    const Index* list = static_cast<const Index*>(side.list);
    const uint64_t allowed = static_cast<uint64_t>(side.row_count);
    int64_t outside = 0;
    for (int64_t i = 0; i < count; ++i)
        outside += static_cast<uint64_t>(int64_t{list[i]}) + 1 > allowed;
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
    copy_rows_by(way_of(copy), copy, threads, stream_above);
}

void copy_rows_by(const Way& way, const RowCopy& copy, int threads, int64_t stream_above) {
    const bool in_words =
        ((reinterpret_cast<uintptr_t>(copy.target.base) | copy.target.stride) & 3) == 0;
    const bool streamed = in_words && copy.count > stream_above / copy.row_bytes;
    const bool staged = in_words && way.is_staged && copy.row_bytes <= kStagedRowMax;
    const SpanFunction copy_run = streamed ? streamer() : copier(Hint::none);
    const auto some = [&](int64_t first, int64_t last) {
        if (staged) copy_staged(copy, way, first, last);
        else copy_spans(copy, way, first, last, copier(way.hint), copy_run);
        finish_streams();
    };
    const int64_t rows = std::max<int64_t>(1, kPieceBytes / copy.row_bytes);
    const int64_t pieces = (copy.count + rows - 1) / rows;
    threads = int(std::min<int64_t>(threads, copy.count * copy.row_bytes / kThreadBytes));
    if (threads <= 1 || pieces <= 1) return some(0, copy.count);
    run_pieces(threads, pieces,
               [&](int64_t i) { some(i * rows, std::min((i + 1) * rows, copy.count)); });
}

}  // namespace ess

// By the way that is settled on, or by number `way` of the table.
// 0: copied. 1: nothing copied, `fault` says why.
ESS_EXPORT int32_t ess_rows_copy(const ess::RowCopy* copy, int32_t threads, int64_t stream_above,
                                 int32_t way, ess::Fault* fault) {
    if (ess::find_fault(copy, 1, fault)) return 1;
    ess::copy_rows_by(way < 0 ? ess::way_of(*copy) : ess::kWays[way % ess::kWayCount], *copy,
                      threads, stream_above);
    return 0;
}
