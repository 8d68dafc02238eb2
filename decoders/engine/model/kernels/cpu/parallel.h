// Runs code in threads of the OpenMP library that torch has loaded, so that there is no second pool of threads.
#pragma once
#include <algorithm>

#if defined(__linux__)
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
extern "C" int omp_get_thread_num() __attribute__((weak));
extern "C" int omp_get_num_threads() __attribute__((weak));
#define HAS_OPENMP (GOMP_parallel && omp_get_thread_num && omp_get_num_threads)
#else
#define HAS_OPENMP false
inline void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) {}
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }
#endif

namespace {

// Calls `body(thread, threads)` in up to `threads` threads; without OpenMP, once in the calling thread.
template <class Body>
void in_threads(int threads, Body body) {
    if (threads <= 1 || !HAS_OPENMP) return body(0, 1);
    GOMP_parallel([](void* given) { (*static_cast<Body*>(given))(omp_get_thread_num(), omp_get_num_threads()); }, &body, threads, 0);
}

// A thread's share begin … end - 1 of `count` items. `begin` is a multiple of `unit`.
inline void share_of(long count, long unit, int thread, int threads, long& begin, long& end) {
    long units = (count + unit - 1) / unit;
    begin = std::min(count, units * thread / threads * unit);
    end = std::min(count, units * (thread + 1) / threads * unit);
}

}  // namespace
