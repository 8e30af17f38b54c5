// Helpers are hired at first need, sleep on a condition variable and live as long as the process.
//
// A task lives on its caller's stack. It stays in the queue only while helpers are still wanted,
// and the caller leaves only when it has taken the task out of the queue and no helper is inside
// it; both happen under the mutex, so no helper can touch a task that is gone.
// A forked child inherits the memory but not the threads: it starts a crew of its own.
#include "crew.h"

#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace ess {
namespace {

struct Task {
    const std::function<void(int64_t)>& piece;
    int64_t piece_count;
    int wanted;
    const int processor = this_processor();
    int inside = 0;
    std::atomic<int64_t> next{0};

    void drain() {
        for (int64_t i; (i = next.fetch_add(1)) < piece_count;) piece(i);
    }
};

class Crew {
public:
    const pid_t process = getpid();

    void run(Task& task) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            hire(task.wanted);
            tasks_.push_back(&task);
            for (int i = task.wanted; i > 0; --i) posted_.notify_one();
        }
        task.drain();
        std::unique_lock<std::mutex> hold(mutex_);
        tasks_.erase(std::remove(tasks_.begin(), tasks_.end(), &task), tasks_.end());
        left_.wait(hold, [&] { return task.inside == 0; });
    }

private:
    void hire(int wanted) {
        try {
            for (; helper_count_ < wanted; ++helper_count_)
                std::thread(&Crew::help, this).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: the caller does the pieces that no helper takes.
        }
    }

    void help() {
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            posted_.wait(hold, [&] { return !tasks_.empty(); });
            Task& task = *tasks_.front();
            if (--task.wanted == 0) tasks_.pop_front();
            ++task.inside;
            hold.unlock();
            step_aside(task.processor);
            task.drain();
            hold.lock();
            if (--task.inside == 0) left_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable posted_;
    std::condition_variable left_;
    std::deque<Task*> tasks_;
    int helper_count_ = 0;
};

// Never destroyed: helpers may still sleep on it while the process exits.
Crew& crew_of_this_process() {
    static std::atomic<Crew*> shared{nullptr};
    Crew* crew = shared.load();
    while (!crew || crew->process != getpid()) {
        Crew* fresh = new Crew;
        if (shared.compare_exchange_strong(crew, fresh)) return *fresh;
        delete fresh;
    }
    return *crew;
}

}  // namespace

#if defined(__linux__)
int this_processor() { return sched_getcpu(); }

void step_aside(int processor) {
    cpu_set_t allowed;
    if (this_processor() != processor || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    cpu_set_t others = allowed;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
}
#else
int this_processor() { return -1; }
void step_aside(int) {}
#endif

void run_pieces(int threads, int64_t piece_count, const std::function<void(int64_t)>& piece) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, piece_count)) - 1;
    Task task{piece, piece_count, helpers};
    if (helpers < 1) return task.drain();
    crew_of_this_process().run(task);
}

}  // namespace ess
