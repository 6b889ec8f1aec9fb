// Products of groups by the matrix instructions of AMX, bit for bit those of grouped.cpp: integers are exact, and are
// scaled in the same order.
#pragma once
#include "forms.h"

namespace groups {

#ifdef KVASIR_TILES

constexpr int kMatrixRows = 16;  // of a tile register

// Whether Linux lets this process use the tile registers.
inline bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return may;
}

// Shapes registers 0 to 3 for products [16][16], 4 and 5 for activations, and 6 for a group's weights.
template <class F>
void shape_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, F::kInputs, F::kInputs, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, F::kInputs / 4};
  } shapes;
  asm volatile("" : : "r"(&shapes) : "memory");  // else GCC may drop stores, since it sees no reader
  _tile_loadconfig(&shapes);
}

constexpr int kBatch = 2;  // groups whose products wait to be scaled

// Puts a record's numbers into bytes, in the order of a tile register.
template <class F>
inline const void* unpacked(const uint8_t* record, uint8_t* bytes) {
  if (F::kBits == 8) return record;
  const __m512i mask = _mm512_set1_epi8(15);
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i raw = _mm512_loadu_si512(record + 64 * quad);
    _mm512_store_si512(bytes + 64 * quad, _mm512_and_si512(raw, mask));
    _mm512_store_si512(bytes + 64 * (quad + 4), _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
  }
  return bytes;
}

#define KVASIR_MULTIPLY(tile, activations)                                   \
  if constexpr (tile < kTiles) {                                             \
    _tile_loadd(activations, numbers + tile * kMatrixRows * inputs, inputs); \
    _tile_zero(tile);                                                        \
    if (F::kBits == 4) _tile_dpbsud(tile, activations, 6);                   \
    else _tile_dpbusd(tile, activations, 6);                                 \
  }
#define KVASIR_STORE(tile) \
  if constexpr (tile < kTiles) _tile_stored(tile, products + tile * kMatrixRows * kColumns, 64);

// As add_group's for 16 rows of each tile, not scaled.
template <class F, int kTiles>
inline void multiply_group(const void* weights, const int8_t* numbers, int64_t inputs, int32_t* products) {
  _tile_loadd(6, weights, 64);
  KVASIR_MULTIPLY(0, 4)
  KVASIR_MULTIPLY(1, 5)
  KVASIR_MULTIPLY(2, 4)
  KVASIR_MULTIPLY(3, 5)
  KVASIR_STORE(0)
  KVASIR_STORE(1)
  KVASIR_STORE(2)
  KVASIR_STORE(3)
}
#undef KVASIR_MULTIPLY
#undef KVASIR_STORE

// Adds the products of up to kBatch groups, scaled: the second half of add_group.
template <class F, int kGroups>
inline void add_scaled(const uint8_t* record, const Rounded& a, int64_t inputs, int64_t first, int rows,
                       const int32_t* products, float* sums) {
  const int64_t groups = inputs / kGroup;
  __m512i biased[kGroups];
  __m512 scale[kGroups], least[kGroups];
#pragma GCC unroll 2
  for (int at = 0; at < kGroups; ++at, record += F::kBytes) {
    biased[at] = __m512i{};
    if constexpr (F::kBits == 8)
      for (int quad = 0; quad < F::kInputs / 4; ++quad)
        biased[at] = _mm512_dpbusd_epi32(biased[at], _mm512_set1_epi8(static_cast<int8_t>(kBias)),
                                         _mm512_loadu_si512(record + 64 * quad));
    const uint8_t* scales = record + F::kNumbers;
    scale[at] = scales_at<F>(scales);
    least[at] = F::kHasLeast ? scales_at<F>(scales + F::kScales) : __m512{};
  }
  for (int row = 0; row < rows; ++row) {
    __m512 sum = _mm512_load_ps(sums + row * kColumns);
    const float *own = a.scales + row * groups, *totals = a.sums + row * groups;
#pragma GCC unroll 2
    for (int at = 0; at < kGroups; ++at) {
      const int64_t group = (first + at * F::kInputs) / kGroup;
      __m512i product = _mm512_load_si512(products + (at * kRowBlock + row) * kColumns);
      if constexpr (F::kBits == 8) product = _mm512_sub_epi32(product, biased[at]);
      sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(product), _mm512_set1_ps(own[group])), scale[at], sum);
      if constexpr (F::kHasLeast) sum = _mm512_fmadd_ps(least[at], _mm512_set1_ps(totals[group]), sum);
    }
    _mm512_store_ps(sums + row * kColumns, sum);
  }
}

// Multiplies kTiles tiles of 16 rows.
template <class F, int kTiles>
void multiply_some_tiles(const uint8_t* panel, const Rounded& a, int32_t inputs, float* sums) {
  constexpr int kRows = kTiles * kMatrixRows;
  alignas(64) int32_t products[kBatch * kRowBlock * kColumns];
  alignas(64) uint8_t bytes[kBatch][32 * kColumns];
  const void* weights[kBatch];
  const int64_t panel_bytes = inputs / F::kInputs * F::kBytes;
  std::memset(sums, 0, sizeof(float) * kRows * kColumns);
  shape_tiles<F>();
  for (int32_t first = 0; first < inputs;) {
    const int32_t batch = std::min(kBatch, (inputs - first) / F::kInputs);
    for (int at = 0; at < batch; ++at) {
      const uint8_t* record = panel + at * F::kBytes;
      for (int line = 0; line < F::kBytes; line += 64) __builtin_prefetch(record + panel_bytes + line);
      weights[at] = unpacked<F>(record, bytes[at]);
    }
    asm volatile("" : : "r"(bytes) : "memory");  // as above
    for (int at = 0; at < batch; ++at)
      multiply_group<F, kTiles>(weights[at], a.numbers + first + at * F::kInputs, inputs,
                                products + at * kRowBlock * kColumns);
    if (batch == kBatch) {
      add_scaled<F, kBatch>(panel, a, inputs, first, kRows, products, sums);
    } else {
      for (int at = 0; at < batch; ++at)
        add_scaled<F, 1>(panel + at * F::kBytes, a, inputs, first + at * F::kInputs, kRows,
                         products + at * kRowBlock * kColumns, sums);
    }
    first += batch * F::kInputs;
    panel += batch * F::kBytes;
  }
  _tile_release();
}

// Multiplies as many of up to kRowBlock rows as fill tiles, by matrix instructions; returns their number.
template <class F>
int32_t multiply_tiles(const uint8_t* panel, const Rounded& a, int32_t inputs, int32_t rows, float* sums) {
  const int tiles = may_use_tiles() ? rows / kMatrixRows : 0;
  switch (tiles) {
    case 0: break;
    case 1: multiply_some_tiles<F, 1>(panel, a, inputs, sums); break;
    case 2: multiply_some_tiles<F, 2>(panel, a, inputs, sums); break;
    case 3: multiply_some_tiles<F, 3>(panel, a, inputs, sums); break;
    default: multiply_some_tiles<F, 4>(panel, a, inputs, sums);
  }
  return tiles * kMatrixRows;
}

#else

template <class F>
int32_t multiply_tiles(const uint8_t*, const Rounded&, int32_t, int32_t, float*) {
  return 0;
}

#endif

}  // namespace groups
