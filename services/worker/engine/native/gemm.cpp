// See gemm.h. A register tile is up to 6 rows by one panel; panels are read once per kRowBlock rows.
#include "gemm.h"

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace {

using namespace panels;

constexpr int kPanel = kVectors * kLanes;
constexpr int kHalf = kPanel / 2;
constexpr int kTileRows = 6;
constexpr int kInputBlock = 512;  // a block of a panel and of the rows fits into the L2 cache
constexpr int kRowBlock = 192;
constexpr int kPrefetchSteps = 48;

static_assert(kVectors % 2 == 0, "a panel has a half for each matrix of a pair");

template <class Weight>
constexpr int kStep = std::max(1, 64 / (kLanes * static_cast<int>(sizeof(Weight))));  // vectors of a cache line

template <class Weight>
struct Tile {
  const float* a;
  int64_t a_stride;
  const Weight* panel;
  float* c;
  int64_t c_stride;
  int32_t inputs;
  bool accumulate;    // add to c
  const Weight* ahead;  // data to prefetch: kLines vectors per input
};

template <class Weight, int kRows, int kLines>
void multiply(const Tile<Weight>& tile) {
  Vec sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      sums[row][v] = tile.accumulate ? load(tile.c + row * tile.c_stride + v * kLanes) : Vec{};
  const Weight* panel = tile.panel;
  const float* a = tile.a;
  const Weight* ahead = tile.ahead;
  for (int32_t input = 0; input < tile.inputs; ++input, panel += kPanel, ahead += kLines * kLanes) {
    Vec columns[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) columns[v] = load(panel + v * kLanes);
#pragma GCC unroll 8
    for (int line = 0; line < kLines; line += kStep<Weight>) __builtin_prefetch(ahead + line * kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec value = broadcast(a[row * tile.a_stride + input]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[row][v] += value * columns[v];
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(tile.c + row * tile.c_stride + v * kLanes, sums[row][v]);
}

template <class Weight>
using Multiply = void (*)(const Tile<Weight>&);
template <class Weight, int kLines>
constexpr Multiply<Weight> kMultiply[kTileRows + 1] = {
    nullptr,                     multiply<Weight, 1, kLines>, multiply<Weight, 2, kLines>, multiply<Weight, 3, kLines>,
    multiply<Weight, 4, kLines>, multiply<Weight, 5, kLines>, multiply<Weight, 6, kLines>};

// Computes `rows` rows in tiles of nearly equal height, which also prefetch the next columns: with many tiles each of
// the first a part, with few the last, and a single tile its own columns a little ahead.
template <class Weight>
void multiply_rows(Tile<Weight> tile, int32_t rows) {
  const int32_t tiles = (rows + kTileRows - 1) / kTileRows;
  const Weight* next = tile.panel + static_cast<int64_t>(tile.inputs) * kPanel;
  for (int32_t done = 0; done < tiles; ++done) {
    const int32_t height = (rows + tiles - done - 1) / (tiles - done);
    const bool few = tiles < kVectors;
    tile.ahead = tile.panel;
    if (tiles == 1) tile.ahead += kPrefetchSteps * kPanel;
    if (tiles > 1 && few && done == tiles - 1) tile.ahead = next;
    if (!few && done < kVectors) tile.ahead = next + static_cast<int64_t>(done) * tile.inputs * kLanes;
    (few && done == tiles - 1 ? kMultiply<Weight, kVectors> : kMultiply<Weight, 1>)[height](tile);
    tile.a += height * tile.a_stride;
    tile.c += height * tile.c_stride;
    rows -= height;
  }
}

// Widens a block of bf16 once for all its tiles.
void multiply_widened(const Tile<uint16_t>& tile, int32_t rows) {
  alignas(64) float wide[kInputBlock * kPanel];
  for (int32_t at = 0; at < tile.inputs * kPanel; at += kLanes) {
    if (at % 32 == 0) __builtin_prefetch(tile.panel + at + kInputBlock * kPanel);
    store(wide + at, load(tile.panel + at));
  }
  multiply_rows(Tile<float>{tile.a, tile.a_stride, wide, tile.c, tile.c_stride, tile.inputs, tile.accumulate, nullptr},
                rows);
}

template <class Weight>
void multiply_panel(Tile<Weight> tile, int32_t rows) {
  const int32_t inputs = tile.inputs;
  const int32_t block = rows <= kTileRows ? inputs : kInputBlock;
  for (int32_t first = 0; first < inputs; first += block) {
    tile.inputs = std::min(block, inputs - first);
    if constexpr (sizeof(Weight) == 2) {
      if (rows > 3 * kTileRows) multiply_widened(tile, rows);
      else multiply_rows(tile, rows);
    } else {
      multiply_rows(tile, rows);
    }
    tile.a += tile.inputs;
    tile.panel += static_cast<int64_t>(tile.inputs) * kPanel;
    tile.accumulate = true;
  }
}

void write_gated(const float* sums, float* c, int64_t c_stride, int32_t rows, int32_t columns, bool is_gelu) {
  for (int32_t row = 0; row < rows; ++row, sums += kPanel, c += c_stride) {
    float gated[kHalf];
    for (int v = 0; v < kHalf; v += kLanes) {
      const Vec gate = load(sums + v);
      store(gated + v, (is_gelu ? gelu(gate) : silu(gate)) * load(sums + kHalf + v));
    }
    std::memcpy(c, gated, sizeof(float) * columns);
  }
}

// Computes one panel for at most kRowBlock rows.
template <class Weight>
void finish_panel(const GemmCall& call, Tile<Weight> tile, int32_t rows, int32_t panel) {
  const bool gated = call.epilogue >= GEMM_SILU_MUL;
  const int32_t width = gated ? kHalf : kPanel;
  const int32_t columns = std::min(width, call.outputs - panel * width);
  float* c = tile.c + static_cast<int64_t>(panel) * width;
  tile.panel += static_cast<int64_t>(panel) * kPanel * call.inputs;
  tile.c = c;
  tile.accumulate = call.epilogue == GEMM_ADD;
  if (!gated && columns == kPanel) return multiply_panel(tile, rows);
  alignas(64) float sums[kRowBlock * kPanel];
  tile.c = sums;
  tile.c_stride = kPanel;
  if (tile.accumulate)
    for (int32_t row = 0; row < rows; ++row)
      std::memcpy(sums + row * kPanel, c + row * call.c_stride, sizeof(float) * columns);
  multiply_panel(tile, rows);
  if (gated) return write_gated(sums, c, call.c_stride, rows, columns, call.epilogue == GEMM_GELU_MUL);
  for (int32_t row = 0; row < rows; ++row)
    std::memcpy(c + row * call.c_stride, sums + row * kPanel, sizeof(float) * columns);
}

int32_t panels_of(int32_t outputs, int32_t width) { return (outputs + width - 1) / width; }

// Packs columns [first, first + count) of W to columns [at, at + kWidth) of its panel, padded with zeros.
template <int kWidth>
void pack_columns(const float* weight, int64_t stride, int32_t count, int32_t inputs, float* panel) {
  for (int32_t column = 0; column < kWidth; ++column)
    for (int32_t input = 0; input < inputs; ++input)
      panel[static_cast<int64_t>(input) * kPanel + column] = column < count ? weight[column * stride + input] : 0.0f;
}

template <class Weight>
void unpack_row(const Weight* packed, int32_t inputs, int64_t output, float* row) {
  const Weight* from = packed + output / kPanel * kPanel * inputs + output % kPanel / kLanes * kLanes;
  for (int32_t input = 0; input < inputs; ++input, from += kPanel) row[input] = load(from)[output % kLanes];
}

template <class Weight>
void multiply_all(const GemmCall& call) {
  const int32_t panels = panels_of(call.outputs, call.epilogue >= GEMM_SILU_MUL ? kHalf : kPanel);
  for (int32_t first = 0; first < call.rows; first += kRowBlock) {
    const int32_t rows = std::min(kRowBlock, call.rows - first);
    const Tile<Weight> tile{call.a + first * call.a_stride, call.a_stride, static_cast<const Weight*>(call.packed),
                            call.c + first * call.c_stride, call.c_stride, call.inputs,
                            false,                          nullptr};
#pragma omp parallel for schedule(static) num_threads(call.threads) if (call.threads > 1)
    for (int32_t panel = 0; panel < panels; ++panel) finish_panel(call, tile, rows, panel);
  }
}

}  // namespace

extern "C" {

int32_t gemm_panel_columns(void) { return kPanel; }

int64_t gemm_packed_floats(int32_t outputs, int32_t inputs) {
  return static_cast<int64_t>(panels_of(outputs, kPanel)) * kPanel * inputs;
}

int64_t gemm_packed_pair_floats(int32_t outputs, int32_t inputs) {
  return static_cast<int64_t>(panels_of(outputs, kHalf)) * kPanel * inputs;
}

void gemm_pack(const float* weight, int64_t stride, int32_t outputs, int32_t inputs, float* packed) {
  for (int32_t first = 0; first < outputs; first += kPanel, packed += static_cast<int64_t>(kPanel) * inputs)
    pack_columns<kPanel>(weight + first * stride, stride, std::min(kPanel, outputs - first), inputs, packed);
}

void gemm_pack_pair(const float* gate, const float* up, int64_t stride, int32_t outputs, int32_t inputs,
                    float* packed) {
  for (int32_t first = 0; first < outputs; first += kHalf, packed += static_cast<int64_t>(kPanel) * inputs) {
    const int32_t count = std::min(kHalf, outputs - first);
    pack_columns<kHalf>(gate + first * stride, stride, count, inputs, packed);
    pack_columns<kHalf>(up + first * stride, stride, count, inputs, packed + kHalf);
  }
}

void gemm_unpack_row(const float* packed, int32_t inputs, int64_t output, float* row) {
  unpack_row(packed, inputs, output, row);
}

void gemm_unpack_row_halves(const uint16_t* packed, int32_t inputs, int64_t output, float* row) {
  unpack_row(packed, inputs, output, row);
}

void gemm(const GemmCall* call) { multiply_all<float>(*call); }

void gemm_halves(const GemmCall* call) { multiply_all<uint16_t>(*call); }
}
