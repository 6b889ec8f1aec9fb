// What the files of grouped.h share: instruction sets, records of weights, and rounded activations.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "grouped.h"
#include "vector.h"

#if defined(KVASIR_PORTABLE)
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define KVASIR_VNNI 1
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define KVASIR_TILES 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define KVASIR_AVX2 1
#endif

namespace groups {

constexpr int kColumns = 16;
constexpr int kGroup = 32;  // of activations
constexpr int kHalf = kColumns / 2;
constexpr int kRowBlock = 64;
constexpr int64_t kAhead = 8192;
#ifdef KVASIR_VNNI
constexpr bool kIsWide = true;
constexpr int kBias = 128;  // makes activations unsigned beside weights of 8 bits, which are signed
#else
constexpr bool kIsWide = false;
constexpr int kBias = 0;
#endif

// The form of a record.
template <int bits, int group, bool halves, bool has_least>
struct Form {
  static constexpr int kBits = bits, kInputs = group;
  static constexpr bool kHalves = halves, kHasLeast = has_least;
  static constexpr int kNumbers = kColumns * group * bits / 8;
  static constexpr int kScales = kColumns * (halves ? 2 : 4);
  static constexpr int kTileRows = kIsWide ? 8 : bits == 4 ? 4 : 3;  // as many as keep their sums in registers
  static constexpr int kBytes = kNumbers + kScales * (has_least ? 2 : 1);
};
using FourHalves = Form<4, 32, true, true>;
using FourFloats = Form<4, 32, false, true>;
using EightHalves = Form<8, 32, true, false>;
using EightFloats = Form<8, 32, false, true>;
using EightSixteen = Form<8, 16, false, false>;

// Calls `work` with the form of a kind.
template <class Work>
auto with_form(int32_t kind, Work work) {
  switch (kind) {
    case MATRIX_FOUR_HALVES: return work(FourHalves{});
    case MATRIX_FOUR_FLOATS: return work(FourFloats{});
    case MATRIX_EIGHT_HALVES: return work(EightHalves{});
    case MATRIX_EIGHT_FLOATS: return work(EightFloats{});
    default: return work(EightSixteen{});
  }
}

inline float from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &rest, sizeof value);
  value *= 0x1p112f;  // exact, for subnormal halves too
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Of a value that fp16 has exactly.
inline uint16_t to_half(float value) {
  const float scaled = std::fabs(value) * 0x1p-112f;
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  return static_cast<uint16_t>((bits >> 13) | (std::signbit(value) ? 0x8000 : 0));
}

template <class F>
float scale_of(const uint8_t* scales, int column) {
  if constexpr (F::kHalves) {
    uint16_t half;
    std::memcpy(&half, scales + 2 * column, 2);
    return from_half(half);
  } else {
    float value;
    std::memcpy(&value, scales + 4 * column, 4);
    return value;
  }
}

template <class F>
void put_scale(uint8_t* scales, int column, float value) {
  if constexpr (F::kHalves) {
    const uint16_t half = to_half(value);
    std::memcpy(scales + 2 * column, &half, 2);
  } else {
    std::memcpy(scales + 4 * column, &value, 4);
  }
}

// Byte of a record with an input's number: quads of inputs of 16 columns. Of four bits, inputs 16 to 31 are the high
// nibbles.
template <class F>
int place(int column, int input) {
  return (F::kBits == 4 ? input & 15 : input) / 4 * 4 * kColumns + column * 4 + input % 4;
}

constexpr float kMost = 127;               // largest number of an activation
constexpr float kRounder = 12582912.0f;    // 1.5 * 2^23: adding it rounds to the nearest integer
constexpr int32_t kRounderBits = 0x4B400000;

// Activations of some rows in 8 bits: numbers [rows][inputs], and a scale and scaled sum for each group.
struct Rounded {
  const int8_t* numbers;  // beside weights of 8 bits with kBias
  const float* scales;
  const float* sums;
};

#ifdef KVASIR_VNNI

// As below, bit for bit.
inline void round_row(const float* row, int32_t inputs, int32_t bias, int8_t* numbers, float* scales, float* sums) {
  const __m512 rounder = _mm512_set1_ps(kRounder);
  const __m512i offset = _mm512_set1_epi32(bias - kRounderBits), added = _mm512_set1_epi32(2 * bias);
  for (int32_t first = 0; first < inputs; first += kGroup, row += kGroup, numbers += kGroup) {
    const __m512 low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + 16), zero{};
    const __m512 most = _mm512_max_ps(_mm512_abs_ps(high), _mm512_max_ps(_mm512_abs_ps(low), zero));
    const __m512 poison = _mm512_add_ps(_mm512_mul_ps(low, zero), _mm512_mul_ps(high, zero));
    const bool is_bad = _mm512_cmp_ps_mask(poison, poison, _CMP_UNORD_Q);
    const float widest = _mm512_reduce_max_ps(most);
    const float inverse = widest > 0 ? kMost / widest : 0.0f, scale = is_bad ? NAN : widest / kMost;
    const __m512 by = _mm512_set1_ps(inverse);
    const __m512i one = _mm512_add_epi32(_mm512_castps_si512(_mm512_fmadd_ps(low, by, rounder)), offset);
    const __m512i two = _mm512_add_epi32(_mm512_castps_si512(_mm512_fmadd_ps(high, by, rounder)), offset);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers), _mm512_cvtepi32_epi8(one));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + 16), _mm512_cvtepi32_epi8(two));
    const __m512i total = _mm512_sub_epi32(_mm512_add_epi32(one, two), added);
    *scales++ = scale;
    *sums++ = scale * static_cast<float>(_mm512_reduce_add_epi32(total));
  }
}

#else

inline void round_row(const float* row, int32_t inputs, int32_t bias, int8_t* numbers, float* scales, float* sums) {
  using namespace panels;
  for (int32_t first = 0; first < inputs; first += kGroup, row += kGroup, numbers += kGroup) {
    Vec most{}, poison{};
    for (int i = 0; i < kGroup; i += kLanes) {
      const Vec value = load(row + i), size = value < 0 ? -value : value;
      most = size > most ? size : most;
      poison += value * 0.0f;  // NaN for NaN and infinities, which no comparison shows
    }
    float widest = 0;
    for (int lane = 0; lane < kLanes; ++lane) widest = most[lane] > widest ? most[lane] : widest;
    const float inverse = widest > 0 ? kMost / widest : 0.0f, scale = widest / kMost + sum(poison);
    IntVec total{};
    for (int i = 0; i < kGroup; i += kLanes) {
      const Vec shifted = load(row + i) * inverse + kRounder;
      IntVec number;
      std::memcpy(&number, &shifted, sizeof number);
      number -= kRounderBits;
      total += number;
      typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
      const ByteVec bytes = __builtin_convertvector(number + bias, ByteVec);
      std::memcpy(numbers + i, &bytes, sizeof bytes);
    }
    int32_t added = 0;
    for (int lane = 0; lane < kLanes; ++lane) added += total[lane];
    *scales++ = scale;
    *sums++ = scale * static_cast<float>(added);
  }
}

#endif

#ifdef KVASIR_VNNI

template <class F>
inline __m512 scales_at(const uint8_t* from) {
  if constexpr (F::kHalves)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  else
    return _mm512_loadu_ps(from);
}

#endif

}  // namespace groups
