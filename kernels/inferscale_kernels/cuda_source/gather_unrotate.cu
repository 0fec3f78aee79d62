// Gather-and-unrotate, the capture direction: paged cache -> arena, keys un-rotated in float32
// and encoded with the arena's codec.
//
//   blockDim  (LANES, heads of a block, tokens of a block)
//   gridDim   (token blocks, groups of layers_per_thread layers, head blocks)
//
// The lanes of a head find its largest element together, by shuffles: they are a power of two, so
// that a team never straddles warps, and each holds RUNS_PER_LANE pairs of runs.

#include "pages.h"

__device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

constexpr int LANES = power_of_two_from(PAIRS_OF_RUNS) < 32 ? power_of_two_from(PAIRS_OF_RUNS) : 32;
constexpr int RUNS_PER_LANE = (PAIRS_OF_RUNS + LANES - 1) / LANES;

__device__ __forceinline__ float team_max(float x) {
  const unsigned tid = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  // Only the team: others of the warp may have no token left.
  const unsigned mask = (LANES == 32 ? 0xffffffffu : (1u << LANES % 32) - 1) << (tid % 32 / LANES * LANES);
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(mask, x, step, LANES));
  return x;
}

template <class From>
__device__ __forceinline__ void get(const Raw<VEC * From::BYTES>& raw, float (&x)[VEC],
                                    float scale) {
  decode<From, VEC>(raw, x);
  if constexpr (Same<From, Float8E4M3>::value) multiply(x, scale);
}

__device__ __forceinline__ void divide_by(float (&x)[VEC], const float* divisors) {
  constexpr int STEP = VEC < 4 ? VEC : 4;
#pragma unroll
  for (int i = 0; i < VEC; i += STEP) {
    float divisor[STEP];
    load_floats<STEP>(divisors + i, divisor);
#pragma unroll
    for (int j = 0; j < STEP; ++j) x[i + j] /= divisor[j];
  }
}

__device__ __forceinline__ bool holds_runs(int r) {
  return static_cast<int>(threadIdx.x) + r * LANES < PAIRS_OF_RUNS;
}

template <class To> __device__ __forceinline__ void quantise(float (&x)[VEC], float scale) {
#pragma unroll
  for (int i = 0; i < VEC; ++i)
    // The scale was rounded: the largest element may come out just above the range.
    x[i] = fminf(fmaxf(x[i] / scale, -To::LARGEST), To::LARGEST);
}

// Encodes a head that its team holds; `row` is the head in the arena, `scale_at` its scale.
template <class To>
__device__ __forceinline__ void encode_head(float (&a)[RUNS_PER_LANE][VEC],
                                            float (&b)[RUNS_PER_LANE][VEC],
                                            const Runs (&runs)[RUNS_PER_LANE], unsigned char* row,
                                            unsigned short* scale_at) {
  if constexpr (SCALED) {
    float largest = 0.0f;
#pragma unroll
    for (int r = 0; r < RUNS_PER_LANE; ++r) {
#pragma unroll
      for (int i = 0; i < VEC; ++i)
        largest = fmaxf(largest, fmaxf(fabsf(a[r][i]), fabsf(b[r][i])));
    }
    unsigned bits = BFloat16::pack(team_max(largest) / To::LARGEST, 0.0f);
    if (bits == 0) bits = BFloat16::pack(1.0f, 0.0f);
    if (threadIdx.x == 0) *scale_at = static_cast<unsigned short>(bits);
    const float scale = float_of(bits << 16);
#pragma unroll
    for (int r = 0; r < RUNS_PER_LANE; ++r) {
      quantise<To>(a[r], scale);
      quantise<To>(b[r], scale);
    }
  }
#pragma unroll
  for (int r = 0; r < RUNS_PER_LANE; ++r) {
    if (!holds_runs(r)) break;
    store_raw<VEC * To::BYTES>(row + runs[r].a * To::BYTES, encode<To, VEC>(a[r]));
    store_raw<VEC * To::BYTES>(row + runs[r].b * To::BYTES, encode<To, VEC>(b[r]));
  }
}

// Arguments as rotate_scatter's, the other way: src are paged slots, dst arena slots, positions
// those at which the keys were computed.
//
// Without a number of blocks ptxas aims at one of its own, and spills for it.
extern "C" __global__ void __launch_bounds__(128, VEC > 8 ? 4 : 5)
    gather_unrotate(unsigned char* __restrict__ arena, unsigned short* __restrict__ scales,
                    const float* __restrict__ key_channels, const long long* __restrict__ src,
                    const int* __restrict__ dst, const long long* __restrict__ positions,
                    const Layer* __restrict__ layers, int num_tokens, int num_layers,
                    long long num_slots, int num_heads, int block_size, int layers_per_thread) {
  const int token = blockIdx.x * blockDim.z + threadIdx.z;
  const int head = blockIdx.z * blockDim.y + threadIdx.y;
  if (token >= num_tokens || head >= num_heads) return;
  const long long source = src[token];
  const long long slot = dst[token];
  if (slot < 0 || source < 0) return;
  const PagedSlot paged(source, block_size);
  const long long position = positions[token];

  const int first_layer = blockIdx.y * layers_per_thread;
  const int last_layer = min(first_layer + layers_per_thread, num_layers);
  long long stored = (first_layer * num_slots + slot) * 2 * num_heads + head;

  Runs runs[RUNS_PER_LANE];
  for (int l = first_layer; l < last_layer; ++l) {
    const Layer& layer = layers[l];
    const long long page =
        (paged.elements(layer) + head * layer.head_stride) * CACHE::BYTES;
    const unsigned char* k = layer.keys + page;
    const unsigned char* v = layer.values + page;
    Raw<VEC * CACHE::BYTES> k_a[RUNS_PER_LANE], k_b[RUNS_PER_LANE];
    Raw<VEC * CACHE::BYTES> v_a[RUNS_PER_LANE], v_b[RUNS_PER_LANE];
#pragma unroll
    for (int r = 0; r < RUNS_PER_LANE; ++r) {
      if (!holds_runs(r)) break;
      choose_runs(runs[r], layer, threadIdx.x + r * LANES, position);
      k_a[r] = load_raw<VEC * CACHE::BYTES>(k + runs[r].a * CACHE::BYTES);
      k_b[r] = load_raw<VEC * CACHE::BYTES>(k + runs[r].b * CACHE::BYTES);
      v_a[r] = load_raw<VEC * CACHE::BYTES>(v + runs[r].a * CACHE::BYTES);
      v_b[r] = load_raw<VEC * CACHE::BYTES>(v + runs[r].b * CACHE::BYTES);
    }

    unsigned char* row = arena + stored * (HEAD_DIM * ARENA::BYTES);
    // Zero where a lane holds no runs: they take part in the search for the largest.
    float a[RUNS_PER_LANE][VEC] = {}, b[RUNS_PER_LANE][VEC] = {};
#pragma unroll
    for (int r = 0; r < RUNS_PER_LANE; ++r) {
      if (!holds_runs(r)) break;
      get<CACHE>(v_a[r], a[r], layer.v_scale);
      get<CACHE>(v_b[r], b[r], layer.v_scale);
    }
    unsigned short* scale_at = SCALED ? scales + stored : nullptr;
    encode_head<ARENA>(a, b, runs, row + num_heads * (HEAD_DIM * ARENA::BYTES),
                       SCALED ? scale_at + num_heads : nullptr);
#pragma unroll
    for (int r = 0; r < RUNS_PER_LANE; ++r) {
      if (!holds_runs(r)) break;
      get<CACHE>(k_a[r], a[r], layer.k_scale);
      get<CACHE>(k_b[r], b[r], layer.k_scale);
      turn_runs<Unrotate>(runs[r], a[r], b[r]);
      if (key_channels) {
        const float* channels = key_channels + (l * num_heads + head) * HEAD_DIM;
        divide_by(a[r], channels + runs[r].a);
        divide_by(b[r], channels + runs[r].b);
      }
    }
    encode_head<ARENA>(a, b, runs, row, scale_at);
    stored += 2 * num_slots * num_heads;
  }
}
