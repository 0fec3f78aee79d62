// What both kernels share: a layer's paged cache, which dims a thread holds, and the rotation.
//
// The program is compiled for one configuration, given as macros:
//   ARENA, CACHE  element types of the arena and of the paged cache (elements.h)
//   SCALED        1 where the arena holds quantised elements and a scale per token and head
//   HEAD_DIM      elements of a head
//   VEC           elements of one access; divides every stride, HEAD_DIM / 2 and rotary_dim / 2
//
// A thread holds two runs of VEC dims of a head, A and B. Where the pairing is NeoX, B holds the
// partners of A; interleaved pairs lie within a run. The threads of a head read its runs A side
// by side and its runs B side by side, so that a warp's accesses are whole 32-byte sectors.
//
//   dims   0 ............ rotary_dim/2 ......... rotary_dim ............... HEAD_DIM
//          |A0|A1|A2|A3|  |B0|B1|B2|B3|          |A4|A5|  |B4|B5|
//            rotated together, by thread           copied

#pragma once

#include "elements.h"

static_assert(HEAD_DIM % (2 * VEC) == 0, "HEAD_DIM must be a multiple of 2 * VEC");

constexpr int PAIRS_OF_RUNS = HEAD_DIM / (2 * VEC);

// One layer. Strides are in elements; K and V share them. Mirrored by pages.LAYER in Python.
struct alignas(16) Layer {
  unsigned char* keys;
  unsigned char* values;
  const float* table;  // [max_position, rotary_dim], or null: this layer's keys are not rotated
  long long block_stride;
  long long head_stride;
  long long slot_stride;
  int rotary_dim;
  int is_neox;
  float k_scale;  // of an 8-bit cache: stored = value / scale
  float v_scale;
};

static_assert(sizeof(Layer) == 64, "the Python side writes 64 bytes a layer");

// Which dims a thread holds, and the angles of its dims: kept while the table stays the same.
struct Runs {
  const float* table = nullptr;
  int is_neox = -1;
  bool rotates = false;
  int a = 0, b = 0;
  float cos[VEC], sin[VEC];
};

template <int COUNT> __device__ __forceinline__ void load_floats(const float* from, float* to) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(from) + i);
      to[4 * i] = v.x;
      to[4 * i + 1] = v.y;
      to[4 * i + 2] = v.z;
      to[4 * i + 3] = v.w;
    }
  } else if constexpr (COUNT == 2) {
    const float2 v = __ldg(reinterpret_cast<const float2*>(from));
    to[0] = v.x;
    to[1] = v.y;
  } else {
    static_assert(COUNT == 1, "a run is a power of two of elements");
    to[0] = __ldg(from);
  }
}

// Runs of the `pair`-th thread of a head in `layer`, for a token at `position`.
__device__ __forceinline__ void choose_runs(Runs& runs, const Layer& layer, int pair,
                                            long long position) {
  if (runs.table == layer.table && runs.is_neox == layer.is_neox) return;
  runs.table = layer.table;
  runs.is_neox = layer.is_neox;
  const int rotary_dim = layer.table ? layer.rotary_dim : 0;
  const int half = rotary_dim / 2;
  const int first = pair * VEC;
  runs.rotates = first < half;
  if (!runs.rotates) {
    runs.a = rotary_dim + first - half;
    runs.b = runs.a + (HEAD_DIM - rotary_dim) / 2;
    return;
  }
  const float* cos = layer.table + position * rotary_dim;
  const float* sin = cos + half;
  runs.a = first;
  runs.b = half + first;
  if constexpr (VEC > 1) {
    if (!layer.is_neox) {
      load_floats<VEC / 2>(cos + first / 2, runs.cos);
      load_floats<VEC / 2>(cos + (half + first) / 2, runs.cos + VEC / 2);
      load_floats<VEC / 2>(sin + first / 2, runs.sin);
      load_floats<VEC / 2>(sin + (half + first) / 2, runs.sin + VEC / 2);
      return;
    }
  } else if (!layer.is_neox) {
    // A run of one element holds no pair: its partner is the other run, as with NeoX.
    runs.a = 2 * first;
    runs.b = 2 * first + 1;
  }
  load_floats<VEC>(cos + first, runs.cos);
  load_floats<VEC>(sin + first, runs.sin);
}

struct Rotate {
  static __device__ __forceinline__ void turn(float& first, float& second, float cos, float sin) {
    const float x = first * cos - second * sin;
    second = second * cos + first * sin;
    first = x;
  }
};

// A low-precision table has cos^2 + sin^2 != 1, and YaRN's carries its magnitude scale.
struct Unrotate {
  static __device__ __forceinline__ void turn(float& first, float& second, float cos, float sin) {
    const float norm = cos * cos + sin * sin;
    const float x = (first * cos + second * sin) / norm;
    second = (second * cos - first * sin) / norm;
    first = x;
  }
};

template <class Direction>
__device__ __forceinline__ void turn_runs(const Runs& runs, float (&a)[VEC], float (&b)[VEC]) {
  if (!runs.rotates) return;
  if (VEC == 1 || runs.is_neox) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) Direction::turn(a[i], b[i], runs.cos[i], runs.sin[i]);
  } else {
#pragma unroll
    for (int i = 0; i + 1 < VEC; i += 2) {
      Direction::turn(a[i], a[i + 1], runs.cos[i / 2], runs.sin[i / 2]);
      Direction::turn(b[i], b[i + 1], runs.cos[(VEC + i) / 2], runs.sin[(VEC + i) / 2]);
    }
  }
}

__device__ __forceinline__ void multiply(float (&x)[VEC], float factor) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) x[i] *= factor;
}

// Elements of a paged slot before its head's and dim's: 32-bit division, once a token.
struct PagedSlot {
  unsigned block, offset;

  __device__ __forceinline__ PagedSlot(long long slot, int block_size) {
    block = static_cast<unsigned>(slot) / static_cast<unsigned>(block_size);
    offset = static_cast<unsigned>(slot) - block * static_cast<unsigned>(block_size);
  }

  __device__ __forceinline__ long long elements(const Layer& layer) const {
    return block * layer.block_stride + offset * layer.slot_stride;
  }
};
