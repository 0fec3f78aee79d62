// Rotate-and-scatter: arena -> paged cache, keys rotated to their serving positions. One launch
// for all tokens of all segments, layers and requests of a step.
//
//   blockDim  (PAIRS_OF_RUNS, heads of a block, tokens of a block)
//   gridDim   (token blocks, groups of layers_per_thread layers, head blocks)
//
// A thread walks the layers of its group with one token, head and pair of runs: slots, angles and
// the division by block_size are paid once. It has 4 runs in flight, A and B of a key and of a
// value. The heads of a warp read the same angles in one access.

#include "pages.h"

// x / scale, correctly rounded, in three operations for a scale whose reciprocal is at hand
// (Markstein, IBM J. Res. Dev. 34(1), 1990). Clamped first, or an infinity would become NaN.
__device__ __forceinline__ float divide(float x, float scale, float reciprocal, float largest) {
  const float q = fminf(fmaxf(x * reciprocal, -largest), largest);
  const float remainder = fmaf(-q, scale, x);
  // A zero keeps its sign.
  return remainder == 0.0f ? q : fmaf(remainder, reciprocal, q);
}

// x * factors, four factors at a time: all at once would hold VEC registers more.
__device__ __forceinline__ void multiply_by(float (&x)[VEC], const float* factors) {
  constexpr int STEP = VEC < 4 ? VEC : 4;
#pragma unroll
  for (int i = 0; i < VEC; i += STEP) {
    float factor[STEP];
    load_floats<STEP>(factors + i, factor);
#pragma unroll
    for (int j = 0; j < STEP; ++j) x[i + j] *= factor[j];
  }
}

// Stores floats that were decoded already.
template <class To>
__device__ __forceinline__ void put(unsigned char* to, float (&x)[VEC], float scale) {
  if constexpr (Same<To, Float8E4M3>::value) {
    const float reciprocal = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < VEC; ++i) x[i] = divide(x[i], scale, reciprocal, To::LARGEST);
  }
  store_raw<VEC * To::BYTES>(to, encode<To, VEC>(x));
}

// Values need no arithmetic where both sides hold the same elements.
template <class From, class To>
__device__ __forceinline__ void put_value(unsigned char* to, const Raw<VEC * From::BYTES>& raw,
                                          float factor, float scale) {
  if constexpr (Same<From, To>::value && !SCALED) {
    store_raw<VEC * To::BYTES>(to, raw);
  } else {
    float x[VEC];
    decode<From, VEC>(raw, x);
    if constexpr (SCALED) multiply(x, factor);
    put<To>(to, x, scale);
  }
}

// arena         [num_layers, num_slots, 2, num_heads, HEAD_DIM] ARENA, 0 = key, 1 = value
// scales        [num_layers, num_slots, 2, num_heads] bfloat16, or null
// key_channels  [num_layers, num_heads, HEAD_DIM], or null
// src, dst      [num_tokens] arena and paged slots; a token with a negative one is skipped
// positions     [num_tokens] rows of the layers' tables
// layers        [num_layers]
//
// Six blocks a multiprocessor: 768 threads with 64 bytes each keep 48 KiB in flight, more than
// twice what an H200's bandwidth needs at a latency of 1 us. Decoding needs more registers than six
// blocks have, and reads half the bytes: five.
extern "C" __global__ void __launch_bounds__(128, VEC > 8 ? 4 : SCALED ? 5 : 6)
    rotate_scatter(const unsigned char* __restrict__ arena,
                   const unsigned short* __restrict__ scales,
                   const float* __restrict__ key_channels, const int* __restrict__ src,
                   const long long* __restrict__ dst, const long long* __restrict__ positions,
                   const Layer* __restrict__ layers, int num_tokens, int num_layers,
                   long long num_slots, int num_heads, int block_size, int layers_per_thread,
                   float key_scale) {
  const int token = blockIdx.x * blockDim.z + threadIdx.z;
  const int head = blockIdx.z * blockDim.y + threadIdx.y;
  if (token >= num_tokens || head >= num_heads) return;
  const long long slot = src[token];
  const long long target = dst[token];
  if (slot < 0 || target < 0) return;
  const PagedSlot paged(target, block_size);
  const long long position = positions[token];

  const int first_layer = blockIdx.y * layers_per_thread;
  const int last_layer = min(first_layer + layers_per_thread, num_layers);
  // Heads of the arena before this key; its value is num_heads further, a layer 2 * num_slots *
  // num_heads.
  long long stored = (first_layer * num_slots + slot) * 2 * num_heads + head;

  Runs runs;
  for (int l = first_layer; l < last_layer; ++l) {
    const Layer& layer = layers[l];
    choose_runs(runs, layer, threadIdx.x, position);
    const unsigned char* k = arena + stored * (HEAD_DIM * ARENA::BYTES);
    const unsigned char* v = k + num_heads * (HEAD_DIM * ARENA::BYTES);
    const auto k_a = load_raw<VEC * ARENA::BYTES>(k + runs.a * ARENA::BYTES);
    const auto k_b = load_raw<VEC * ARENA::BYTES>(k + runs.b * ARENA::BYTES);
    const auto v_a = load_raw<VEC * ARENA::BYTES>(v + runs.a * ARENA::BYTES);
    const auto v_b = load_raw<VEC * ARENA::BYTES>(v + runs.b * ARENA::BYTES);
    float key_factor = 1.0f, value_factor = 1.0f;
    if constexpr (SCALED) {
      key_factor = float_of(__ldg(scales + stored) << 16);
      value_factor = float_of(__ldg(scales + stored + num_heads) << 16);
    }

    const long long page =
        (paged.elements(layer) + head * layer.head_stride) * CACHE::BYTES;
    // Values first: their registers are free by the time the keys are floats.
    unsigned char* to = layer.values + page;
    put_value<ARENA, CACHE>(to + runs.a * CACHE::BYTES, v_a, value_factor, layer.v_scale);
    put_value<ARENA, CACHE>(to + runs.b * CACHE::BYTES, v_b, value_factor, layer.v_scale);

    float a[VEC], b[VEC];
    decode<ARENA, VEC>(k_a, a);
    decode<ARENA, VEC>(k_b, b);
    if constexpr (SCALED) {
      multiply(a, key_factor);
      multiply(b, key_factor);
    }
    if (key_channels) {
      const float* channels = key_channels + (l * num_heads + head) * HEAD_DIM;
      multiply_by(a, channels + runs.a);
      multiply_by(b, channels + runs.b);
    }
    turn_runs<Rotate>(runs, a, b);
    multiply(a, key_scale);
    multiply(b, key_scale);
    to = layer.keys + page;
    put<CACHE>(to + runs.a * CACHE::BYTES, a, layer.k_scale);
    put<CACHE>(to + runs.b * CACHE::BYTES, b, layer.k_scale);
    stored += 2 * num_slots * num_heads;
  }
}
