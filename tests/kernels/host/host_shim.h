// Enough of CUDA for g++ to compile the kernels' source as it is, one thread after the other.
//
// Shuffles need the threads of a block side by side: they run as fibers, each until its next
// shuffle, round by round. Kernels without shuffles run as a plain loop.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

static dim3 threadIdx, blockIdx, blockDim, gridDim;

template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldcs(const T* from) { return *from; }
inline int __float2int_rn(float x) { return x == x ? static_cast<int>(std::nearbyintf(x)) : 0; }
inline int min(int a, int b) { return a < b ? a : b; }

namespace host {

constexpr size_t STACK = 256 * 1024;

struct Fiber {
  ucontext_t context;
  dim3 index;
  bool done;
  unsigned rounds;
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static size_t current;
static void (*body)(void**);
static void** arguments;
// What each thread shuffles, for even and odd rounds: the fast one of a pair may be one ahead.
static std::vector<float> shuffled[2];

#ifdef __SANITIZE_ADDRESS__
static const void* scheduler_stack;
static size_t scheduler_size;
static void leaving(void** fake, const void* stack, size_t size) {
  __sanitizer_start_switch_fiber(fake, stack, size);
}
static void arrived(void* fake, const void** stack, size_t* size) {
  __sanitizer_finish_switch_fiber(fake, stack, size);
}
#else
static const void* scheduler_stack;
static size_t scheduler_size;
static void leaving(void**, const void*, size_t) {}
static void arrived(void*, const void**, size_t*) {}
#endif

static void yield() {
  void* fake = nullptr;
  leaving(&fake, scheduler_stack, scheduler_size);
  swapcontext(&fibers[current].context, &scheduler);
  arrived(fake, &scheduler_stack, &scheduler_size);
}

static void enter() {
  arrived(nullptr, &scheduler_stack, &scheduler_size);
  body(arguments);
  fibers[current].done = true;
  leaving(nullptr, scheduler_stack, scheduler_size);
  swapcontext(&fibers[current].context, &scheduler);
}

static void run_fibers() {
  const size_t count = blockDim.x * blockDim.y * blockDim.z;
  fibers.resize(count);
  stacks.resize(count * STACK);
  for (auto& values : shuffled) values.assign(count, NAN);
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = &stacks[i * STACK];
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    const unsigned n = static_cast<unsigned>(i);
    fiber.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    fiber.done = false;
    fiber.rounds = 0;
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (current = 0; current < count; ++current) {
      if (fibers[current].done) continue;
      threadIdx = fibers[current].index;
      void* fake = nullptr;
      leaving(&fake, &stacks[current * STACK], STACK);
      swapcontext(&scheduler, &fibers[current].context);
      arrived(fake, nullptr, nullptr);
      alive = alive || !fibers[current].done;
    }
  }
}

template <auto KERNEL> struct Caller;
template <class... Args, void (*KERNEL)(Args...)> struct Caller<KERNEL> {
  template <size_t... I> static void apply(void** args, std::index_sequence<I...>) {
    KERNEL(*reinterpret_cast<std::remove_reference_t<Args>*>(args[I])...);
  }
  static void call(void** args) { apply(args, std::index_sequence_for<Args...>{}); }
  static int count() { return sizeof...(Args); }
  static int size(int i) {
    const int sizes[] = {sizeof(Args)...};
    return sizes[i];
  }
};

template <auto KERNEL>
void launch(const unsigned* grid, const unsigned* block, void** args, bool shuffles) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  body = Caller<KERNEL>::call;
  arguments = args;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        if (shuffles) {
          run_fibers();
          continue;
        }
        for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
          for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) body(args);
      }
}

}  // namespace host

// Aborts where the device would be undefined: a lane outside of the mask, or one that has left.
inline float __shfl_xor_sync(unsigned mask, float value, int step, int width) {
  using namespace host;
  const size_t self = current, other = self ^ static_cast<size_t>(step);
  if (!(mask >> self % 32 & 1u) || !(mask >> other % 32 & 1u) || self / width != other / width ||
      other >= fibers.size())
    __builtin_trap();
  const unsigned round = fibers[self].rounds++;
  shuffled[round % 2][self] = value;
  yield();
  if (fibers[other].rounds < round + 1) __builtin_trap();
  return shuffled[round % 2][other];
}
