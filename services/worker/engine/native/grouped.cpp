// See grouped.h.
#include "grouped.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "forms.h"
#include "tiles.h"
#include "vector.h"

namespace {

using namespace groups;

#if defined(KVASIR_VNNI)

inline __m512i four_bytes(const void* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return _mm512_set1_epi32(word);
}

template <int kRows>
using Sums = __m512[kRows];

// Adds one group's products of kRows rows, by dot products of four bytes, the first unsigned.
template <class F, int kRows>
inline void add_group(const uint8_t* record, const Rounded& a, int64_t inputs, int64_t first, Sums<kRows>& sums) {
  __m512i products[kRows] = {};
  const int64_t groups = inputs / kGroup, group = first / kGroup;
  const int8_t* numbers = a.numbers + first;
  if constexpr (F::kBits == 4) {
    const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const __m512i raw = _mm512_loadu_si512(record + 64 * quad);
      const __m512i low = _mm512_and_si512(raw, mask), high = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const int8_t* own = numbers + row * inputs + 4 * quad;
        products[row] = _mm512_dpbusd_epi32(products[row], low, four_bytes(own));
        products[row] = _mm512_dpbusd_epi32(products[row], high, four_bytes(own + 16));
      }
    }
  } else {
    __m512i biased{};  // what kBias adds to each product
#pragma GCC unroll 8
    for (int quad = 0; quad < F::kInputs / 4; ++quad) {
      const __m512i weights = _mm512_loadu_si512(record + 64 * quad);
      biased = _mm512_dpbusd_epi32(biased, _mm512_set1_epi8(static_cast<int8_t>(kBias)), weights);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
        products[row] = _mm512_dpbusd_epi32(products[row], four_bytes(numbers + row * inputs + 4 * quad), weights);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) products[row] = _mm512_sub_epi32(products[row], biased);
  }
  const uint8_t* scales = record + F::kNumbers;
  const __m512 scale = scales_at<F>(scales), least = F::kHasLeast ? scales_at<F>(scales + F::kScales) : __m512{};
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const __m512 own = _mm512_set1_ps(a.scales[row * groups + group]);
    sums[row] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(products[row]), own), scale, sums[row]);
    if constexpr (F::kHasLeast)
      sums[row] = _mm512_fmadd_ps(least, _mm512_set1_ps(a.sums[row * groups + group]), sums[row]);
  }
}

#elif defined(KVASIR_AVX2)

template <class F>
inline __m256 scales_at(const uint8_t* from, int v) {
  if constexpr (F::kHalves)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * v)));
  else
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + 8 * v);
}

inline __m256i four_bytes(const int8_t* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return _mm256_set1_epi32(word);
}

template <int kRows>
using Sums = __m256[kRows][2];  // as many as possible stay in registers

// Adds one group's products of kRows rows.
template <class F, int kRows>
inline void add_group(const uint8_t* record, const Rounded& a, int64_t inputs, int64_t first, Sums<kRows>& sums) {
  __m256i products[kRows][2] = {};
  const int64_t groups = inputs / kGroup, group = first / kGroup;
  const int8_t* numbers = a.numbers + first;
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (F::kBits == 4) {
    const __m256i mask = _mm256_set1_epi8(15);
    // 8 products of pairs, 2 · 15 · 127 each, fit into 16 bits
#pragma GCC unroll 1  // else the sums are reassociated, and leave the registers
    for (int quad = 0; quad < 4; ++quad) {
      const __m256i* from = reinterpret_cast<const __m256i*>(record + 64 * quad);
      const __m256i raw0 = _mm256_loadu_si256(from), raw1 = _mm256_loadu_si256(from + 1);
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const __m256i w0 = _mm256_and_si256(side ? _mm256_srli_epi16(raw0, 4) : raw0, mask);
        const __m256i w1 = _mm256_and_si256(side ? _mm256_srli_epi16(raw1, 4) : raw1, mask);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m256i b = four_bytes(numbers + row * inputs + 16 * side + 4 * quad);
          const __m256i p0 = _mm256_maddubs_epi16(w0, b), p1 = _mm256_maddubs_epi16(w1, b);
          products[row][0] = _mm256_add_epi16(products[row][0], p0);
          products[row][1] = _mm256_add_epi16(products[row][1], p1);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < 2; ++v) products[row][v] = _mm256_madd_epi16(products[row][v], ones);
  } else {
#pragma GCC unroll 1
    for (int quad = 0; quad < F::kInputs / 4; ++quad) {
      const __m256i* from = reinterpret_cast<const __m256i*>(record + 64 * quad);
      const __m256i w0 = _mm256_loadu_si256(from), w1 = _mm256_loadu_si256(from + 1);
      const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i b = four_bytes(numbers + row * inputs + 4 * quad);
        const __m256i p0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(b, w0));  // 2 · 128 · 127 fits into 16 bits
        const __m256i p1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(b, w1));
        products[row][0] = _mm256_add_epi32(products[row][0], _mm256_madd_epi16(p0, ones));
        products[row][1] = _mm256_add_epi32(products[row][1], _mm256_madd_epi16(p1, ones));
      }
    }
  }
  const uint8_t* scales = record + F::kNumbers;
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const __m256 scale = scales_at<F>(scales, v);
    const __m256 least = F::kHasLeast ? scales_at<F>(scales + F::kScales, v) : __m256{};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256 own = _mm256_set1_ps(a.scales[row * groups + group]);
      const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(products[row][v]), own);
      sums[row][v] = _mm256_fmadd_ps(product, scale, sums[row][v]);
      if constexpr (F::kHasLeast)
        sums[row][v] = _mm256_fmadd_ps(least, _mm256_set1_ps(a.sums[row * groups + group]), sums[row][v]);
    }
  }
}

#else

template <int kRows>
using Sums = float[kRows][kColumns];

template <class F, int kRows>
inline void add_group(const uint8_t* record, const Rounded& a, int64_t inputs, int64_t first, Sums<kRows>& sums) {
  const int64_t groups = inputs / kGroup, group = first / kGroup;
  for (int row = 0; row < kRows; ++row) {
    int32_t products[kColumns] = {};
    for (int input = 0; input < F::kInputs; ++input) {
      const int32_t value = a.numbers[row * inputs + first + input];
      for (int column = 0; column < kColumns; ++column) {
        const uint8_t byte = record[place<F>(column, input)];
        const int32_t weight = F::kBits == 8 ? static_cast<int8_t>(byte) : input < 16 ? byte & 15 : byte >> 4;
        products[column] += weight * value;
      }
    }
    const uint8_t* scales = record + F::kNumbers;
    const float own = a.scales[row * groups + group], total = a.sums[row * groups + group];
    for (int column = 0; column < kColumns; ++column) {
      float& sum = sums[row][column];
      sum = std::fma(static_cast<float>(products[column]) * own, scale_of<F>(scales, column), sum);
      if constexpr (F::kHasLeast) sum = std::fma(scale_of<F>(scales + F::kScales, column), total, sum);
    }
  }
}

#endif

// Also prefetches the memory `ahead` bytes further on.
template <class F, int kRows>
void multiply_tile(const uint8_t* panel, int64_t ahead, const Rounded& a, int32_t inputs, float* sums) {
  Sums<kRows> own = {};
  for (int32_t first = 0; first < inputs; first += F::kInputs, panel += F::kBytes) {
    if (ahead)
      for (int line = 0; line < F::kBytes; line += 64) __builtin_prefetch(panel + ahead + line);
    add_group<F, kRows>(panel, a, inputs, first, own);
  }
  std::memcpy(sums, own, sizeof own);
}

// Multiplies tiles of 1 to kTileRows rows.
template <class F, int... kLess>
void multiply_tile_of(int rows, std::integer_sequence<int, kLess...>, const uint8_t* panel, int64_t ahead,
                      const Rounded& a, int32_t inputs, float* sums) {
  ((rows == kLess + 1 ? multiply_tile<F, kLess + 1>(panel, ahead, a, inputs, sums) : void()), ...);
}

template <class F>
void multiply_rows(const uint8_t* panel, const Rounded& a, int32_t inputs, int32_t rows, float* sums) {
  const int64_t groups = inputs / kGroup;
  int64_t ahead = rows <= F::kTileRows ? kAhead : inputs / F::kInputs * F::kBytes;
  int32_t row = multiply_tiles<F>(panel, a, inputs, rows, sums);
  if (row) ahead = 0;
  for (; row < rows; row += F::kTileRows) {
    const Rounded own{a.numbers + int64_t{row} * inputs, a.scales + row * groups, a.sums + row * groups};
    multiply_tile_of<F>(std::min(F::kTileRows, rows - row), std::make_integer_sequence<int, F::kTileRows>{}, panel,
                        ahead, own, inputs, sums + row * kColumns);
    ahead = 0;
  }
}

void write_gated(const float* sums, float* gated, bool is_gelu) {
  using namespace panels;
  constexpr int kStep = kLanes < kHalf ? kLanes : kHalf;
  for (int at = 0; at < kHalf; at += kStep) {
    Vec gate{}, up{};
    std::memcpy(&gate, sums + at, sizeof(float) * kStep);
    std::memcpy(&up, sums + kHalf + at, sizeof(float) * kStep);
    const Vec product = (is_gelu ? gelu(gate) : silu(gate)) * up;
    std::memcpy(gated + at, &product, sizeof(float) * kStep);
  }
}

// Writes the gated values of whole rows two by two, where a register holds two; returns the number of rows.
int32_t write_gated_pairs(const float* sums, float* c, int64_t c_stride, int32_t rows, bool is_gelu) {
  int32_t row = 0;
#ifdef KVASIR_VNNI
  for (; row + 1 < rows; row += 2, sums += 2 * kColumns, c += 2 * c_stride) {
    const __m512 one = _mm512_loadu_ps(sums), two = _mm512_loadu_ps(sums + kColumns);
    const panels::Vec gate = _mm512_shuffle_f32x4(one, two, 0x44), up = _mm512_shuffle_f32x4(one, two, 0xEE);
    const __m512d product = _mm512_castps_pd((is_gelu ? panels::gelu(gate) : panels::silu(gate)) * up);
    _mm256_storeu_ps(c, _mm256_castpd_ps(_mm512_castpd512_pd256(product)));
    _mm256_storeu_ps(c + c_stride, _mm256_castpd_ps(_mm512_extractf64x4_pd(product, 1)));
  }
#endif
  return row;
}

void finish(const float* sums, float* c, int64_t c_stride, int32_t rows, int32_t columns, int32_t epilogue) {
  float gated[kHalf];
  int32_t row = 0;
  if (epilogue >= GEMM_SILU_MUL && columns == kHalf)
    row = write_gated_pairs(sums, c, c_stride, rows, epilogue == GEMM_GELU_MUL);
  for (sums += row * kColumns, c += row * c_stride; row < rows; ++row, sums += kColumns, c += c_stride) {
    if (epilogue >= GEMM_SILU_MUL) write_gated(sums, gated, epilogue == GEMM_GELU_MUL);
    if (epilogue == GEMM_ADD)
      for (int32_t column = 0; column < columns; ++column) c[column] += sums[column];
    else
      std::memcpy(c, epilogue >= GEMM_SILU_MUL ? gated : sums, sizeof(float) * columns);
  }
}

int32_t panels_of(int32_t outputs, int32_t width) { return (outputs + width - 1) / width; }

template <class F>
void multiply_grouped(const Matrix& matrix, const float* a, int64_t a_stride, float* c, int64_t c_stride, int32_t rows,
                      int32_t epilogue, int32_t threads, float* scratch) {
  constexpr int32_t bias = F::kBits == 8 ? kBias : 0;
  const int64_t inputs = matrix.inputs, groups = inputs / kGroup;
  int8_t* numbers = reinterpret_cast<int8_t*>(scratch);
  float* scales = scratch + rows * inputs / 4;
  float* totals = scales + rows * groups;
  const int32_t width = epilogue >= GEMM_SILU_MUL ? kHalf : kColumns;
  const int32_t panels = panels_of(matrix.outputs, width);
  const int64_t panel_bytes = inputs / F::kInputs * F::kBytes;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int32_t row = 0; row < rows; ++row)
      round_row(a + row * a_stride, matrix.inputs, bias, numbers + row * inputs, scales + row * groups,
                totals + row * groups);
    for (int32_t first = 0; first < rows; first += kRowBlock) {
      const int32_t count = std::min(kRowBlock, rows - first);
      const Rounded own{numbers + first * inputs, scales + first * groups, totals + first * groups};
#pragma omp for schedule(static) nowait
      for (int32_t panel = 0; panel < panels; ++panel) {
        alignas(64) float sums[kRowBlock * kColumns];
        const uint8_t* from = static_cast<const uint8_t*>(matrix.data) + panel * panel_bytes;
        multiply_rows<F>(from, own, matrix.inputs, count, sums);
        const int32_t columns = std::min(width, matrix.outputs - panel * width);
        finish(sums, c + first * c_stride + static_cast<int64_t>(panel) * width, c_stride, count, columns, epilogue);
      }
    }
  }
}

}  // namespace

extern "C" {

int64_t grouped_bytes(int32_t kind, int32_t outputs, int32_t inputs) {
  return with_form(kind, [&](auto form) {
    using F = decltype(form);
    return int64_t{panels_of(outputs, kColumns)} * (inputs / F::kInputs) * F::kBytes;
  });
}

void grouped_pack(int32_t kind, const uint8_t* numbers, const float* scales, const float* least, int32_t outputs,
                  int32_t inputs, void* packed) {
  with_form(kind, [&](auto form) {
    using F = decltype(form);
    const int64_t groups = inputs / F::kInputs;
    uint8_t* record = static_cast<uint8_t*>(packed);
    for (int32_t first = 0; first < outputs; first += kColumns)
      for (int64_t group = 0; group < groups; ++group, record += F::kBytes) {
        std::memset(record, 0, F::kBytes);
        for (int column = 0; column < std::min(kColumns, outputs - first); ++column) {
          const int64_t row = first + column;
          const uint8_t* from = numbers + row * inputs + group * F::kInputs;
          for (int input = 0; input < F::kInputs; ++input)
            record[place<F>(column, input)] |= F::kBits == 4 && input >= 16 ? from[input] << 4 : from[input];
          put_scale<F>(record + F::kNumbers, column, scales[row * groups + group]);
          if (F::kHasLeast && least)
            put_scale<F>(record + F::kNumbers + F::kScales, column, least[row * groups + group]);
        }
      }
  });
}

void matrix_row(const Matrix* matrix, int64_t output, float* row) {
  if (matrix->kind == MATRIX_FLOATS)
    return gemm_unpack_row(static_cast<const float*>(matrix->data), matrix->inputs, output, row);
  if (matrix->kind == MATRIX_HALVES)
    return gemm_unpack_row_halves(static_cast<const uint16_t*>(matrix->data), matrix->inputs, output, row);
  if (matrix->kind == MATRIX_ROWS) {
    const float* from = static_cast<const float*>(matrix->data) + output * matrix->inputs;
    std::copy(from, from + matrix->inputs, row);
    return;
  }
  with_form(matrix->kind, [&](auto form) {
    using F = decltype(form);
    const int64_t groups = matrix->inputs / F::kInputs;
    const uint8_t* record = static_cast<const uint8_t*>(matrix->data) + output / kColumns * groups * F::kBytes;
    const int column = static_cast<int>(output % kColumns);
    for (int64_t group = 0; group < groups; ++group, record += F::kBytes) {
      const float scale = scale_of<F>(record + F::kNumbers, column);
      const float least = F::kHasLeast ? scale_of<F>(record + F::kNumbers + F::kScales, column) : 0.0f;
      for (int input = 0; input < F::kInputs; ++input) {
        const uint8_t byte = record[place<F>(column, input)];
        const int32_t number = F::kBits == 8 ? static_cast<int8_t>(byte) : input < 16 ? byte & 15 : byte >> 4;
        *row++ = scale * static_cast<float>(number) + least;
      }
    }
  });
}

int64_t matrix_scratch(int32_t inputs) { return inputs / 4 + inputs / kGroup * 2; }

void matrix_multiply(const Matrix* matrix, const float* a, int64_t a_stride, float* c, int64_t c_stride, int32_t rows,
                     int32_t epilogue, int32_t threads, float* scratch) {
  if (matrix->kind == MATRIX_FLOATS || matrix->kind == MATRIX_HALVES) {
    const GemmCall call{a, a_stride, matrix->data, c, c_stride, rows, matrix->outputs, matrix->inputs, epilogue, threads};
    return matrix->kind == MATRIX_FLOATS ? gemm(&call) : gemm_halves(&call);
  }
  with_form(matrix->kind, [&](auto form) {
    multiply_grouped<decltype(form)>(*matrix, a, a_stride, c, c_stride, rows, epilogue, threads, scratch);
  });
}
}
