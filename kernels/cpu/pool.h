// Threads that help with the units of a job while they have a core, and are not waited for when they have none.
//
// A parallel region of OpenMP ends when each of its threads has come to the end: if another program has the core of one,
// all wait for the operating system to give it back, milliseconds for microseconds of work, hundreds of times an
// iteration. Here the caller takes units like everybody else until there are none left, then closes the job and waits
// for those only that are in the middle of a unit. One that comes too late finds the job closed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace evenflow {

class Pool {
  public:
    // Calls `body(context, unit)` for all units on at most `threads` threads, the calling one among them. While one
    // thread's job runs, that of another is done by the thread that asks for it, alone.
    void run(int64_t threads, int64_t units, void (*body)(const void*, int64_t), const void* context) {
        std::unique_lock<std::mutex> alone(caller_, std::try_to_lock);
        if (threads <= 1 || units <= 1 || !alone.owns_lock()) {
            for (int64_t unit = 0; unit < units; ++unit) body(context, unit);
            return;
        }
        const uint32_t helpers = static_cast<uint32_t>(threads - 1 < MOST ? threads - 1 : MOST);
        for (; made_ < helpers; ++made_) std::thread([this, index = made_] { help(index); }).detach();
        body_ = body;
        context_ = context;
        units_ = units;
        helpers_ = helpers;
        next_.store(0, std::memory_order_relaxed);
        // Nobody is inside a closed job, so only this thread changes the state here.
        const uint32_t open = ((state_.load(std::memory_order_relaxed) & ~(OPEN | INSIDE)) + JOB) | OPEN;
        // Sequentially consistent, as the look for sleepers that follows: it must not come before.
        state_.store(open, std::memory_order_seq_cst);
        state_.notify_all();
        work(body, context, units);
        state_.fetch_and(~OPEN, std::memory_order_relaxed);
        for (int turn = 0; state_.load(std::memory_order_acquire) & INSIDE; ++turn)
            turn < SPINS ? pause() : std::this_thread::yield();
    }

  private:
    // The state: helpers inside the job, whether it is open, and its number.
    static constexpr uint32_t INSIDE = (1u << 10) - 1, OPEN = 1u << 10, JOB = 1u << 11, MOST = INSIDE - 1;
    static constexpr int SPINS = 1000;
    // How long a helper looks for the next job before it sleeps: longer than what lies between two of an iteration.
    static constexpr auto AWAKE = std::chrono::microseconds(200);

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void work(void (*body)(const void*, int64_t), const void* context, int64_t units) {
        for (int64_t unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < units;) body(context, unit);
    }

    void help(uint32_t index) {
        uint32_t seen = 0;
        for (;;) {
            uint32_t state = another(seen);
            // Inside, the job cannot end; outside, it may be another already.
            while ((state & OPEN) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
            }
            seen = state & ~(OPEN | INSIDE);
            if (!(state & OPEN)) continue;
            if (index < helpers_) work(body_, context_, units_);
            state_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Waits for a job other than `seen`, and returns the state.
    uint32_t another(uint32_t seen) {
        const auto until = std::chrono::steady_clock::now() + AWAKE;
        for (int turn = 1;; ++turn) {
            uint32_t state = state_.load(std::memory_order_acquire);
            if ((state & ~(OPEN | INSIDE)) != seen) return state;
            pause();
            if (turn % 32 || std::chrono::steady_clock::now() < until) continue;
            // That it changes while others enter or leave wakes nobody: only new jobs are told of.
            state_.wait(state, std::memory_order_acquire);
        }
    }

    std::mutex caller_;
    uint32_t made_ = 0;
    alignas(64) std::atomic<uint32_t> state_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) void (*body_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    int64_t units_ = 0;
    uint32_t helpers_ = 0;
};

// Never destroyed: its threads live as long as the process.
inline Pool& pool() {
    static Pool* const only = new Pool;
    return *only;
}

}  // namespace evenflow
