// Which way is settled on for which class. Until it is measured, this follows from what was
// measured on two makers' machines: requests gain everywhere on one, and on the other as long as
// the target fits its second-level cache; above that, and on unknown machines, rows are
// copied as torch.index_select does it, so that nothing loses to that.
#include "ways.h"

#include <atomic>

#include "../native.h"

namespace ess {
namespace {

int size_class(int64_t row_bytes) { return row_bytes <= 384 ? 0 : row_bytes <= 1024 ? 1 : 2; }
int count_class(int64_t count) { return count <= 1024 ? 0 : count <= 8192 ? 1 : 2; }

int unmeasured([[maybe_unused]] int at) {
#if defined(__x86_64__)
    if (__builtin_cpu_is("amd")) return kRequests;
    if (__builtin_cpu_is("intel") && at % kCountClasses < 2) return kRequests;
#endif
    return kPlain;
}

struct Settled {
    std::atomic<int> way[kClasses];

    Settled() { reset(); }
    void reset() {
        for (int at = 0; at < kClasses; at++) way[at] = unmeasured(at);
    }
};

Settled& settled() {
    static Settled ways;
    return ways;
}

}  // namespace

const Way& way_of(const RowCopy& copy) {
    if (copy.source.index_bytes == 0 || copy.target.index_bytes != 0) return kWays[kRequests];
    const int at = size_class(copy.row_bytes) * kCountClasses + count_class(copy.count);
    return kWays[settled().way[at].load(std::memory_order_relaxed)];
}

}  // namespace ess

// The name of way `at`, or null behind the last.
ESS_EXPORT const char* ess_rows_way(int32_t at) {
    return at >= 0 && at < ess::kWayCount ? ess::kWays[at].name : nullptr;
}

// A way for each class, or null for what holds unmeasured. 1; or 0 with nothing changed.
ESS_EXPORT int32_t ess_rows_settle(const int32_t* ways) {
    ess::Settled& now = ess::settled();
    for (int at = 0; ways && at < ess::kClasses; at++)
        if (ways[at] < 0 || ways[at] >= ess::kWayCount) return 0;
    if (!ways) now.reset();
    for (int at = 0; ways && at < ess::kClasses; at++) now.way[at] = ways[at];
    return 1;
}

// What is settled on, by class.
ESS_EXPORT void ess_rows_settled(int32_t* ways) {
    for (int at = 0; at < ess::kClasses; at++) ways[at] = ess::settled().way[at];
}
