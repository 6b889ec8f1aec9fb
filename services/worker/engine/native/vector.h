// Vectors of floats of the machine's width, by compiler extensions without intrinsics.
#pragma once
#include <cstdint>
#include <cstring>

namespace panels {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectors = 4;  // columns of a register tile; with 6 rows: 24 of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kVectors = 2;  // 12 of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kVectors = 2;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

// Loads bf16.
inline Vec load(const uint16_t* from) {
  HalfVec halves;
  std::memcpy(&halves, from, sizeof halves);
  const UintVec bits = __builtin_convertvector(halves, UintVec) << 16;
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }

inline Vec broadcast(float value) { return value - Vec{}; }

inline float sum(Vec value) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}

// Returns e^x to about 2 units in the last place; x is clamped to [-87, 88]. NaN stays NaN.
inline Vec exponential(Vec x) {
  x = x > 88.0f ? broadcast(88.0f) : x;
  x = x < -87.0f ? broadcast(-87.0f) : x;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * 1.44269504088896341f + kRounder;
  const Vec whole = shifted - kRounder;
  const Vec rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vec series = broadcast(1.9875691500e-4f);
  series = series * rest + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  UintVec bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000u + 127u) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  return series * power;
}

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// GELU by its approximation through tanh, which is x times the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu(Vec x) { return x / (1.0f + exponential(x * -1.5957691216057308f * (1.0f + 0.044715f * x * x))); }

}  // namespace panels
