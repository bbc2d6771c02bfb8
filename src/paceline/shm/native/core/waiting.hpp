// Waiting for another process: a counter in shared memory that one side raises and others wait for.
//
// A waiter spins while that is cheap, then lets other threads run, then sleeps in the kernel (futex), so that it
// takes no core that computation needs. Asleep, it looks up about ten times a second whether its peers still live.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace paceline {

using Clock = std::chrono::steady_clock;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Lies in shared memory; zero bytes are a valid one.
struct alignas(64) Signal {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  void raise(uint32_t to) {
    value.store(to);  // sequentially consistent: a sleeper either sees it or is seen
    wake();
  }

  void ring() {
    value.fetch_add(1);
    wake();
  }

  void wake() {
    if (sleepers.load() != 0) {
      syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Sleep until the value is no longer `seen`, or for a nap.
  void sleep(uint32_t seen, std::chrono::milliseconds nap) {
    const timespec limit{nap.count() / 1000, (nap.count() % 1000) * 1000000};
    sleepers.fetch_add(1);
    if (value.load() == seen) {
      syscall(SYS_futex, &value, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1);
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// How long a waiter stays awake.
struct Patience {
  std::chrono::microseconds spin{0};
  std::chrono::microseconds yield{0};

  static Patience none() {
    return {};
  }

  // Spinning is free only where every rank of the host has a core of its own.
  static Patience for_ranks(int ranks) {
    cpu_set_t cores;
    const bool known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
    const bool roomy = known && ranks <= CPU_COUNT(&cores);
    return roomy ? Patience{std::chrono::microseconds(20), std::chrono::microseconds(200)}
                 : Patience{std::chrono::microseconds(0), std::chrono::microseconds(40)};
  }
};

constexpr std::chrono::milliseconds kNap{100};

// Wait until `ready(value)`. `look_up` runs after every nap without a signal, and throws to give up.
template <typename Ready, typename LookUp>
void wait(Signal& signal, const Patience& patience, Ready ready, LookUp look_up) {
  if (ready(signal.value.load(std::memory_order_acquire))) {
    return;
  }
  if (patience.yield.count() > 0) {
    const auto start = Clock::now();
    const auto spun = start + patience.spin;
    const auto yielded = spun + patience.yield;
    for (auto now = start; now < yielded; now = Clock::now()) {
      for (int turn = 0; turn < 16; ++turn) {
        if (ready(signal.value.load(std::memory_order_acquire))) {
          return;
        }
        relax();
      }
      if (now >= spun) {
        sched_yield();
      }
    }
  }
  auto checked = Clock::now();
  for (;;) {
    const uint32_t seen = signal.value.load();
    if (ready(seen)) {
      return;
    }
    signal.sleep(seen, kNap);
    if (Clock::now() - checked >= kNap && !ready(signal.value.load())) {
      look_up();
      checked = Clock::now();
    }
  }
}

}  // namespace paceline
