// A few worker threads that share one list of tasks at a time. Nobody spins: waiting threads give
// their core away, then sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace sgl {

class Pool {
 public:
  typedef void (*Task)(void* context, int index);

  static Pool& instance() {
    static Pool* pool = new Pool();  // never destroyed: workers outlive static destruction
    return *pool;
  }

  void set_threads(int count) {
    std::lock_guard<std::mutex> guard(resize_);
    count = count < 1 ? 1 : count;
    allowed_.store(count - 1);
    while (int(workers_.size()) < count - 1) {
      int id = int(workers_.size());
      workers_.emplace_back([this, id] { work(id); });
      workers_.back().detach();
    }
  }

  int threads() const { return allowed_.load(std::memory_order_relaxed) + 1; }

  // Run task(context, 0 .. count-1), in any order, on this thread and the workers; returns when all
  // are done. A worker that is asleep or preempted before it took a task is not waited for.
  void run(int count, Task task, void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
    if (count <= 1 || threads() == 1 || !mine.try_lock()) {
      for (int i = 0; i < count; ++i) task(context, i);
      return;
    }
    task_ = task;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    uint64_t epoch = ((state_.load(std::memory_order_relaxed) >> kEpochShift) + 1) & kEpochMask;
    state_.store((epoch << kEpochShift) | (uint64_t(count) << kCountBits));
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> guard(mutex_);
      wake_.notify_all();
    }
    drain();
    while (done_.load(std::memory_order_acquire) != count) sched_yield();
  }

 private:
  static constexpr int kCountBits = 22;
  static constexpr int kEpochShift = 44;
  static constexpr uint64_t kEpochMask = (uint64_t(1) << 20) - 1;
  static constexpr uint64_t kIndexMask = (uint64_t(1) << kCountBits) - 1;

  // Take tasks of whatever list is current. The epoch in the same word keeps a late thread from
  // taking an index of a list that is over.
  void drain() {
    for (;;) {
      uint64_t state = state_.load(std::memory_order_acquire);
      uint64_t index = state & kIndexMask;
      uint64_t count = (state >> kCountBits) & kIndexMask;
      if (index >= count) return;
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      task_(context_, int(index));
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  bool has_work() const {
    uint64_t state = state_.load(std::memory_order_acquire);
    return (state & kIndexMask) < ((state >> kCountBits) & kIndexMask);
  }

  void work(int id) {
    for (;;) {
      auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
      while (!(has_work() && id < allowed_.load(std::memory_order_relaxed))) {
        if (std::chrono::steady_clock::now() < until) {
          sched_yield();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait_for(lock, std::chrono::seconds(1), [this] { return has_work(); });
        sleeping_.fetch_sub(1);
        until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
      }
      drain();
    }
  }

  std::mutex resize_, mutex_, busy_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<int> allowed_{0}, sleeping_{0}, done_{0};
  std::atomic<uint64_t> state_{0};
  Task task_ = nullptr;
  void* context_ = nullptr;
};

// Below this much work, waking or waiting for another thread costs more than it saves, and a busy
// neighbour on the other core would hold up short calls. A guess, measured on 2 virtual cores.
constexpr double kWorthSharingUs = 200.0;

// body(0 .. count-1), shared between threads if all of it takes about `cost_us` or more.
template <class F>
static inline void parallel_for(int count, double cost_us, F&& body) {
  if (cost_us < kWorthSharingUs) {
    for (int i = 0; i < count; ++i) body(i);
    return;
  }
  typedef typename std::remove_reference<F>::type Body;
  Pool::instance().run(
      count, [](void* context, int index) { (*static_cast<Body*>(context))(index); }, &body);
}

}  // namespace sgl
