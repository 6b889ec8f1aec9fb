// Vectors of sixteen floats by compiler extensions: one AVX-512 register, two of AVX2, four of NEON.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(KVASIR_PORTABLE)
#include <immintrin.h>
#define KVASIR_AVX512 1
#define WIDE_COLUMNS 4  // width of a register tile in vectors
#else
#define WIDE_COLUMNS 1
#endif

namespace kvasir {

constexpr int LANES = 16;
constexpr int WIDE = WIDE_COLUMNS;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t UintVec __attribute__((vector_size(64)));
typedef uint32_t WordVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef int8_t ByteVec __attribute__((vector_size(16)));

#define KVASIR_INLINE static inline __attribute__((always_inline))

KVASIR_INLINE Vec broadcast(float x) { return Vec{} + x; }
KVASIR_INLINE Vec load(const float* from) {
  Vec loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}
KVASIR_INLINE Vec from_bf16(HalfVec halves) { return (Vec)(__builtin_convertvector(halves, WordVec) << 16); }
KVASIR_INLINE Vec load(const uint16_t* from) {
  HalfVec halves;
  std::memcpy(&halves, from, sizeof halves);
  return from_bf16(halves);
}
KVASIR_INLINE Vec load(const int8_t* from) {
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}
KVASIR_INLINE void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

// A register of the machine: compilers keep wider vectors in memory.
#if defined(KVASIR_AVX512)
constexpr int PART_LANES = 16;
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
#else
constexpr int PART_LANES = 4;
#endif
constexpr int PARTS = LANES / PART_LANES;
typedef float Part __attribute__((vector_size(PART_LANES * 4)));
typedef uint32_t WordPart __attribute__((vector_size(PART_LANES * 4)));
typedef int32_t IntPart __attribute__((vector_size(PART_LANES * 4)));
typedef uint16_t HalfPart __attribute__((vector_size(PART_LANES * 2)));
typedef int8_t BytePart __attribute__((vector_size(PART_LANES)));

// One by one: a copy of all of them goes through memory.
KVASIR_INLINE void load_parts(const float* from, Part (&parts)[PARTS]) {
  for (int p = 0; p < PARTS; p++) {
    Part part;
    std::memcpy(&part, from + p * PART_LANES, sizeof part);
    parts[p] = part;
  }
}
KVASIR_INLINE Vec joined(const Part (&parts)[PARTS]) {
  Vec whole;
  std::memcpy(&whole, parts, sizeof whole);
  return whole;
}
KVASIR_INLINE void store_parts(float* to, const Part (&parts)[PARTS]) {
  for (int p = 0; p < PARTS; p++) {
    const Part part = parts[p];
    std::memcpy(to + p * PART_LANES, &part, sizeof part);
  }
}
KVASIR_INLINE void load_parts(const uint16_t* from, Part (&parts)[PARTS]) {
  for (int p = 0; p < PARTS; p++) {
    HalfPart halves;
    std::memcpy(&halves, from + p * PART_LANES, sizeof halves);
    parts[p] = (Part)(__builtin_convertvector(halves, WordPart) << 16);
  }
}

KVASIR_INLINE void load_parts(const int8_t* from, Part (&parts)[PARTS]) {
  for (int p = 0; p < PARTS; p++) {
    BytePart bytes;
    std::memcpy(&bytes, from + p * PART_LANES, sizeof bytes);
    parts[p] = __builtin_convertvector(__builtin_convertvector(bytes, IntPart), Part);
  }
}

// Loads the first `lanes` of sixteen values; the others are zero and not read.
KVASIR_INLINE Vec load_some(const float* from, int lanes) {
#ifdef KVASIR_AVX512
  return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << lanes) - 1), from);
#else
  float loaded[LANES] = {};
  for (int lane = 0; lane < lanes; lane++) loaded[lane] = from[lane];
  return load(loaded);
#endif
}
KVASIR_INLINE Vec load_some(const uint16_t* from, int lanes) {
#ifdef KVASIR_AVX512
  return from_bf16((HalfVec)_mm256_maskz_loadu_epi16((__mmask16)((1u << lanes) - 1), from));
#else
  uint16_t loaded[LANES] = {};
  for (int lane = 0; lane < lanes; lane++) loaded[lane] = from[lane];
  return load(loaded);
#endif
}

KVASIR_INLINE Vec load_some(const int8_t* from, int lanes) {
  int8_t loaded[LANES] = {};
  for (int lane = 0; lane < lanes; lane++) loaded[lane] = from[lane];
  return load(loaded);
}

// Prefetches to L2: the L1 cache allows too few concurrent fetches to use the memory's bandwidth.
KVASIR_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

KVASIR_INLINE void put(float* to, float x) { *to = x; }
// Stores as bf16, rounded to nearest even as in torch.
KVASIR_INLINE void put(uint16_t* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  *to = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

KVASIR_INLINE Vec choose(IntVec mask, Vec yes, Vec no) {
  return (Vec)(((IntVec)yes & mask) | ((IntVec)no & ~mask));
}
// Returns lanes [from, until) of `x`, and `other` in the rest.
KVASIR_INLINE Vec within(Vec x, int from, int until, float other) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return choose((lane >= from) & (lane < until), x, broadcast(other));
}
KVASIR_INLINE float largest(Vec x) {
#ifdef KVASIR_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float found = x[0];
  for (int lane = 1; lane < LANES; lane++) found = x[lane] > found ? x[lane] : found;
  return found;
#endif
}
KVASIR_INLINE float added(Vec x) {
#ifdef KVASIR_AVX512
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
#endif
}

// e^x for x <= 88, to about one unit in the last place; 0 below -87. Polynomial: SLEEF's expf_u10.
template <class V, class Bits>
KVASIR_INLINE V exp_lanes(V x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  V shifted = x * 1.442695040888963f + magic;
  V n = shifted - magic;
  V r = x - n * 0.693145751953125f;
  r = r - n * 1.428606765330187045e-06f;
  V p = V{} + 0.000198527617612853646278381f;
  p = p * r + 0.00139304355252534151077271f;
  p = p * r + 0.00833336077630519866943359f;
  p = p * r + 0.0416664853692054748535156f;
  p = p * r + 0.166666671633720397949219f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  Bits scaled = (Bits)p + (((Bits)shifted - 0x4b400000u) << 23);  // wraps below -87; not used there
  return (V)(scaled & ~(Bits)(x < -87.0f));
}
KVASIR_INLINE Vec exp(Vec x) { return exp_lanes<Vec, UintVec>(x); }


// tanh by a polynomial near zero (Cephes' tanhf) and by e^x elsewhere.
KVASIR_INLINE Vec tanh(Vec x) {
  Vec magnitude = choose(x < 0, -x, x);
  magnitude = choose(magnitude > 10.0f, broadcast(10.0f), magnitude);
  Vec far = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
  far = choose(x < 0, -far, far);
  Vec z = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  Vec near = p * z * x + x;
  return choose(magnitude < 0.625f, near, far);
}

}  // namespace kvasir
