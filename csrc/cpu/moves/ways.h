// The ways in which gathers may move rows. All give the same bytes; which is fastest depends on the
// machine, so ess/flashtrans/ways.py times them there and settles on one for each class of copies.
#pragma once

#include "rows.h"

namespace ess {

// Which cache rows are requested into before their turn.
enum class Hint { none, first_level, second_level };

struct Way {
    const char* name;
    Hint hint;
    int64_t ahead_bytes;  // how far ahead of the copy requests run
    bool is_staged;       // rows meet in the first-level cache and are stored past all caches
};

constexpr Way kWays[] = {
    {"requests", Hint::second_level, 16 << 10, false},
    {"plain", Hint::none, 0, false},  // what torch.index_select does
    {"near requests", Hint::second_level, 4 << 10, false},
    {"far requests", Hint::second_level, 48 << 10, false},
    {"first level", Hint::first_level, 4 << 10, false},
    {"staged requests", Hint::second_level, 16 << 10, true},
    {"staged", Hint::none, 0, true},
};
constexpr int kWayCount = sizeof kWays / sizeof *kWays;
constexpr int kRequests = 0, kPlain = 1;

// Classes of gathers: row sizes up to 384 bytes, up to 1,024 and above; counts up to 1,024, up to
// 8,192 and above.
constexpr int kSizeClasses = 3, kCountClasses = 3;
constexpr int kClasses = kSizeClasses * kCountClasses;

// The way settled on for copies like this one. Scatters and copies without a list have one way.
const Way& way_of(const RowCopy& copy);

// As copy_rows of rows.h, by a given way.
void copy_rows_by(const Way& way, const RowCopy& copy, int threads, int64_t stream_above);

}  // namespace ess
