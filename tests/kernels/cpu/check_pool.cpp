// The thread pool without torch, for a thread sanitizer: jobs of many sizes, from several callers at once, each unit of
// which must be computed exactly once and be over when `run` returns.
//
// Usage: check_pool JOBS
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

struct Job {
    std::vector<int>* counts;
};

long call(long jobs, unsigned seed) {
    long wrong = 0;
    for (long job = 0; job < jobs; ++job) {
        seed = seed * 1664525u + 1013904223u;
        const int64_t units = seed >> 28, threads = 1 + (seed >> 24 & 3);
        std::vector<int> counts(units + 1, 0);
        const Job context{&counts};
        evenflow::pool().run(
            threads, units,
            [](const void* given, int64_t unit) { ++(*static_cast<const Job*>(given)->counts)[unit]; }, &context);
        for (int64_t unit = 0; unit < units; ++unit) wrong += counts[unit] != 1;
        wrong += counts[units] != 0;
        // Long enough now and then for helpers to fall asleep.
        if (seed % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(400));
    }
    return wrong;
}

}  // namespace

int main(int count, char** words) {
    if (count != 2) return 2;
    const long jobs = std::strtol(words[1], nullptr, 10);
    long other = 0;
    std::thread second([&] { other = call(jobs / 4, 7); });
    const long wrong = call(jobs, 1);
    second.join();
    std::printf("%ld jobs, %ld wrong\n", jobs + jobs / 4, wrong + other);
    return wrong + other ? 1 : 0;
}
