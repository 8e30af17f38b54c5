// The copy lane: one worker thread that copies, first in first out, beside the threads that
// compute.
//
// A job owns copies of its index lists, so the caller may reuse them at once; the matrices and the
// two timestamps stay the caller's until the job is complete. `completed` grows only after the
// rows and the timestamps of a job are written, under the mutex that every waiter takes: a thread
// that sees a sequence number completed sees its rows.
// A job of at most `at_once_bytes` that finds the lane idle is copied by the thread that submits
// it: waking the worker, and fetching what it wrote from its core's cache, would take longer.
// Nothing is under way then, so the order stays that of submission.
// Closing finishes what was submitted. A forked child has the memory without the thread, and maybe
// a mutex that no thread will ever release: every call asks for the process first and touches
// nothing in a foreign one.
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "../crew.h"
#include "../native.h"
#include "rows.h"

namespace ess {
namespace {

enum Answer : int64_t {
    timed_out = 0,
    bad_row = 0,
    done = 1,
    closed = -1,
    foreign = -2,
    full = -3,
};

struct Job {
    std::vector<RowCopy> copies;
    std::vector<std::unique_ptr<uint8_t[]>> lists;
    int64_t* times;
    int processor = this_processor();

    Job(const RowCopy* first, int64_t count, int64_t* times)
        : copies(first, first + count), times(times) {
        for (RowCopy& copy : copies) {
            own(copy.source, copy.count);
            own(copy.target, copy.count);
        }
    }

    void own(RowSide& side, int64_t count) {
        if (side.index_bytes == 0) return;
        const size_t bytes = static_cast<size_t>(count * side.index_bytes);
        lists.push_back(std::make_unique<uint8_t[]>(bytes));
        std::memcpy(lists.back().get(), side.list, bytes);
        side.list = lists.back().get();
    }
};

class Lane {
public:
    Lane(int threads, int64_t stream_above, int64_t at_once_bytes)
        : threads_(threads),
          stream_above_(stream_above),
          at_once_bytes_(at_once_bytes),
          worker_(&Lane::work, this) {}

    ~Lane() { close(); }

    bool is_foreign() const { return getpid() != process_; }

    int64_t submit(const RowCopy* copies, int64_t count, int64_t* times, int32_t* at_once) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (closing_) return closed;
        *at_once = jobs_.empty() && is_small(copies, count);
        if (*at_once) {
            times[0] = now_ns();
            for (int64_t i = 0; i < count; ++i) copy_rows(copies[i], 1, stream_above_);
            times[1] = now_ns();
            ++completed_;
        } else {
            jobs_.push_back(Job(copies, count, times));
            posted_.notify_one();
        }
        return ++submitted_;
    }

    int64_t wait(int64_t sequence, int64_t timeout_ns) {
        std::unique_lock<std::mutex> hold(mutex_);
        const auto reached = [&] { return completed_ >= sequence; };
        return finished_.wait_for(hold, std::chrono::nanoseconds(timeout_ns), reached) ? done
                                                                                       : timed_out;
    }

    int64_t completed() {
        std::lock_guard<std::mutex> hold(mutex_);
        return completed_;
    }

    void close() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            closing_ = true;
            posted_.notify_one();
        }
        std::lock_guard<std::mutex> one_joins(joining_);
        if (worker_.joinable()) worker_.join();
    }

private:
    bool is_small(const RowCopy* copies, int64_t count) const {
        int64_t bytes = 0;
        for (int64_t i = 0; i < count; ++i) bytes += copies[i].count * copies[i].row_bytes;
        return bytes <= at_once_bytes_;
    }

    void work() {
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            posted_.wait(hold, [&] { return closing_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            const Job& job = jobs_.front();  // stays in place while submit() adds behind it
            hold.unlock();
            run(job);
            hold.lock();
            jobs_.pop_front();
            ++completed_;
            finished_.notify_all();
        }
    }

    void run(const Job& job) {
        step_aside(job.processor);
        job.times[0] = now_ns();
        for (const RowCopy& copy : job.copies) copy_rows(copy, threads_, stream_above_);
        job.times[1] = now_ns();
    }

    const pid_t process_ = getpid();
    const int threads_;
    const int64_t stream_above_;
    const int64_t at_once_bytes_;
    std::mutex mutex_;
    std::mutex joining_;
    std::condition_variable posted_;
    std::condition_variable finished_;
    std::deque<Job> jobs_;
    int64_t submitted_ = 0;
    int64_t completed_ = 0;
    bool closing_ = false;
    std::thread worker_;  // last: it starts when everything above is ready
};

}  // namespace
}  // namespace ess

using ess::Lane;

// Null when the system has no thread to give.
ESS_EXPORT Lane* ess_lane_open(int32_t threads, int64_t stream_above, int64_t at_once_bytes) {
    try {
        return new Lane(threads, stream_above, at_once_bytes);
    } catch (...) {
        return nullptr;
    }
}

// The job's sequence number, from 1; or bad_row (see `fault`), closed, foreign, full.
// Start and end of the job go to times[0] and times[1]; `at_once`: they, and the rows, are there.
ESS_EXPORT int64_t ess_lane_submit(Lane* lane, const ess::RowCopy* copies, int64_t copy_count,
                                   int64_t* times, ess::Fault* fault, int32_t* at_once) {
    if (lane->is_foreign()) return ess::foreign;
    if (ess::find_fault(copies, copy_count, fault)) return ess::bad_row;
    try {
        return lane->submit(copies, copy_count, times, at_once);
    } catch (const std::bad_alloc&) {
        return ess::full;
    }
}

// done, timed_out or foreign.
ESS_EXPORT int64_t ess_lane_wait(Lane* lane, int64_t sequence, int64_t timeout_ns) {
    return lane->is_foreign() ? static_cast<int64_t>(ess::foreign)
                              : lane->wait(sequence, timeout_ns);
}

// The last sequence number that is complete, or foreign.
ESS_EXPORT int64_t ess_lane_completed(Lane* lane) {
    return lane->is_foreign() ? static_cast<int64_t>(ess::foreign) : lane->completed();
}

ESS_EXPORT void ess_lane_close(Lane* lane) {
    if (!lane->is_foreign()) lane->close();
}

// No other call may be under way.
ESS_EXPORT void ess_lane_free(Lane* lane) {
    if (!lane->is_foreign()) delete lane;
}
