// Matrix products with weights of 4 or 8 bits in groups, C = A · Wᵀ: a weight is scale · number + least.
//
// Activations are rounded in groups of 32 of a row, to 8 bits. Products are summed as integers within a group and as
// floats over the groups, in order, so a row's result is bit-identical for any batch, blocking, number of threads and
// instruction set: AMX from 16 rows on (tiles.h), AVX-512 VNNI, AVX2, or none.
// A matrix is stored as panels of 16 outputs; a panel has one record for each group: the numbers, then the scales,
// then the least values. A pair for GEMM_SILU_MUL has 8 outputs of each matrix in a panel.
#pragma once
#include <cstdint>

#include "gemm.h"

#pragma GCC visibility push(default)
extern "C" {

enum MatrixKind : int32_t {
  MATRIX_FLOATS = 0,       // panels of gemm.h
  MATRIX_FOUR_HALVES = 1,  // 4 bits, groups of 32, scale and least in fp16
  MATRIX_FOUR_FLOATS = 2,  // the same in fp32
  MATRIX_EIGHT_HALVES = 3,  // 8 bits signed, groups of 32, scale in fp16
  MATRIX_EIGHT_FLOATS = 4,  // 8 bits signed, groups of 32, scale and least in fp32
  MATRIX_EIGHT_SIXTEEN = 5,  // 8 bits signed, groups of 16, scale in fp32
  MATRIX_ROWS = 6,  // fp32 [outputs, inputs], for matrix_row only
  MATRIX_HALVES = 7,  // panels of gemm.h in bf16
};

struct Matrix {
  const void* data;
  int32_t kind;  // MatrixKind
  int32_t outputs;  // of one matrix of a pair
  int32_t inputs;  // a multiple of 32 in groups
};

// Number of bytes of a matrix [outputs, inputs] with outputs padded to 16; a pair has twice the outputs.
int64_t grouped_bytes(int32_t kind, int32_t outputs, int32_t inputs);

// Packs numbers [outputs, inputs], and scales and least [outputs, inputs / group]; `least` may be null.
void grouped_pack(int32_t kind, const uint8_t* numbers, const float* scales, const float* least, int32_t outputs,
                  int32_t inputs, void* packed);

// Writes row `output` of W in fp32, of any kind.
void matrix_row(const Matrix* matrix, int64_t output, float* row);

// Number of floats of scratch memory for a row of activations.
int64_t matrix_scratch(int32_t inputs);

// C = A · Wᵀ as `epilogue` says, for any kind. `scratch`: [rows * matrix_scratch(inputs)], unused by panels of gemm.h.
void matrix_multiply(const Matrix* matrix, const float* a, int64_t a_stride, float* c, int64_t c_stride, int32_t rows,
                     int32_t epilogue, int32_t threads, float* scratch);
}
#pragma GCC visibility pop
