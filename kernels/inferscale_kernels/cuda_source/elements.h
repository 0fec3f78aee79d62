// Element types of the arena and of the paged cache: runs of them as raw words in registers, and
// their conversions from and to float32, to nearest even.
//
// No CUDA header is included: NVRTC then needs no include path, and the same text compiles for
// the host, where everything outside of __CUDA_ARCH__ runs under the tests.

#pragma once

template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };

__device__ __forceinline__ float float_of(unsigned bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
#endif
}

__device__ __forceinline__ unsigned bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
#endif
}

// BYTES of memory in registers, in the widest words that fill them.
template <int BYTES> struct Raw {
  static constexpr int WORDS = (BYTES + 3) / 4;
  unsigned word[WORDS];
};

// Read once by this grid: the arena's rows must not push the tables out of the caches.
template <class Word> __device__ __forceinline__ Word fetch(const void* from) {
  return __ldcs(reinterpret_cast<const Word*>(from));
}

template <int BYTES> __device__ __forceinline__ Raw<BYTES> load_raw(const void* from) {
  Raw<BYTES> raw;
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 v = fetch<uint4>(reinterpret_cast<const uint4*>(from) + i);
      raw.word[4 * i] = v.x;
      raw.word[4 * i + 1] = v.y;
      raw.word[4 * i + 2] = v.z;
      raw.word[4 * i + 3] = v.w;
    }
  } else if constexpr (BYTES == 8) {
    const uint2 v = fetch<uint2>(from);
    raw.word[0] = v.x;
    raw.word[1] = v.y;
  } else if constexpr (BYTES == 4) {
    raw.word[0] = fetch<unsigned>(from);
  } else if constexpr (BYTES == 2) {
    raw.word[0] = fetch<unsigned short>(from);
  } else {
    static_assert(BYTES == 1, "a run of elements is a power of two of bytes");
    raw.word[0] = fetch<unsigned char>(from);
  }
  return raw;
}

template <int BYTES> __device__ __forceinline__ void store_raw(void* to, const Raw<BYTES>& raw) {
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 v = {raw.word[4 * i], raw.word[4 * i + 1], raw.word[4 * i + 2],
                       raw.word[4 * i + 3]};
      reinterpret_cast<uint4*>(to)[i] = v;
    }
  } else if constexpr (BYTES == 8) {
    const uint2 v = {raw.word[0], raw.word[1]};
    *reinterpret_cast<uint2*>(to) = v;
  } else if constexpr (BYTES == 4) {
    *reinterpret_cast<unsigned*>(to) = raw.word[0];
  } else if constexpr (BYTES == 2) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(raw.word[0]);
  } else {
    *reinterpret_cast<unsigned char*>(to) = static_cast<unsigned char>(raw.word[0]);
  }
}

// Every type converts two elements at a time, the first in the lower bits, as the hardware does.

struct Float32 {
  static constexpr int BYTES = 4;
};

struct BFloat16 {
  static constexpr int BYTES = 2;

  static __device__ __forceinline__ void unpack(unsigned bits, float& first, float& second) {
    first = float_of(bits << 16);
    second = float_of(bits & 0xffff0000u);
  }

  static __device__ __forceinline__ unsigned pack(float first, float second) {
#ifdef __CUDA_ARCH__
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return round(first) | round(second) << 16;
#endif
  }

#ifndef __CUDA_ARCH__
  static __device__ unsigned round(float x) {
    const unsigned bits = bits_of(x);
    if (x != x) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
#endif
};

struct Float16 {
  static constexpr int BYTES = 2;

  static __device__ __forceinline__ float widen(unsigned short bits) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    _Float16 x;
    __builtin_memcpy(&x, &bits, 2);
    return static_cast<float>(x);
#endif
  }

  static __device__ __forceinline__ void unpack(unsigned bits, float& first, float& second) {
    first = widen(static_cast<unsigned short>(bits));
    second = widen(static_cast<unsigned short>(bits >> 16));
  }

  static __device__ __forceinline__ unsigned pack(float first, float second) {
#ifdef __CUDA_ARCH__
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
#else
    const _Float16 pair[2] = {static_cast<_Float16>(first), static_cast<_Float16>(second)};
    unsigned bits;
    __builtin_memcpy(&bits, pair, 4);
    return bits;
#endif
  }
};

// float8_e4m3fn: bias 7, no infinities, 0x7f is NaN; values beyond 448 saturate.
struct Float8E4M3 {
  static constexpr int BYTES = 1;
  static constexpr float LARGEST = 448.0f;

  static __device__ __forceinline__ void unpack(unsigned bits, float& first, float& second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(bits)));
    Float16::unpack(halves, first, second);
#else
    first = widen(bits & 0xffu);
    second = widen(bits >> 8 & 0xffu);
#endif
  }

  static __device__ __forceinline__ unsigned pack(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return round(first) | round(second) << 8;
#endif
  }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
  // The exponent lands in float32's field as it is; the factor 2^(127 - 7) moves its bias, and
  // makes subnormals of subnormals.
  static __device__ __forceinline__ float widen(unsigned bits) {
    const unsigned magnitude = bits & 0x7fu;
    const float x = float_of((bits & 0x80u) << 24 | magnitude << 20) * 0x1p120f;
    return magnitude == 0x7fu ? float_of(0x7fc00000u) : x;
  }

  static __device__ __forceinline__ unsigned round(float x) {
    const unsigned sign = bits_of(x) >> 24 & 0x80u;
    const float magnitude = fminf(fabsf(x), LARGEST);
    unsigned code;
    if (magnitude < 0x1p-6f) {
      // Adding 2^14 leaves float32 with units of 2^-9, the subnormals' step.
      code = bits_of(magnitude + 0x1p14f) - bits_of(0x1p14f);
    } else {
      const unsigned bits = bits_of(magnitude);
      code = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    }
    return sign | (x != x ? 0x7fu : code);
  }
#endif
};

struct Int8 {
  static constexpr int BYTES = 1;
  static constexpr float LARGEST = 127.0f;

  static __device__ __forceinline__ void unpack(unsigned bits, float& first, float& second) {
    first = static_cast<float>(static_cast<signed char>(bits));
    second = static_cast<float>(static_cast<signed char>(bits >> 8));
  }

  // Arguments lie within +-LARGEST.
  static __device__ __forceinline__ unsigned pack(float first, float second) {
    return (__float2int_rn(first) & 0xffu) | (__float2int_rn(second) & 0xffu) << 8;
  }
};

template <class Element, int COUNT>
__device__ __forceinline__ void decode(const Raw<COUNT * Element::BYTES>& raw, float (&x)[COUNT]) {
  if constexpr (Same<Element, Float32>::value) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = float_of(raw.word[i]);
  } else if constexpr (COUNT == 1) {
    float beyond;
    Element::unpack(raw.word[0], x[0], beyond);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const int at = i * Element::BYTES;
      Element::unpack(raw.word[at / 4] >> at % 4 * 8, x[i], x[i + 1]);
    }
  }
}

template <class Element, int COUNT>
__device__ __forceinline__ Raw<COUNT * Element::BYTES> encode(const float (&x)[COUNT]) {
  Raw<COUNT * Element::BYTES> raw = {};
  if constexpr (Same<Element, Float32>::value) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) raw.word[i] = bits_of(x[i]);
  } else if constexpr (COUNT == 1) {
    raw.word[0] = Element::pack(x[0], 0.0f);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const int at = i * Element::BYTES;
      raw.word[at / 4] |= Element::pack(x[i], x[i + 1]) << at % 4 * 8;
    }
  }
  return raw;
}
