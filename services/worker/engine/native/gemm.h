// fp32 matrix products of activations and packed weights of fp32 or bf16, C = A · Wᵀ, with fused epilogues.
//
// A weight matrix W [outputs, inputs] is stored as panels [inputs][columns] of gemm_panel_columns() outputs, the last
// one padded with zeros. Every output is one chain of fused multiply-adds in the order of the inputs, so a row's result
// is bit-identical for any batch, blocking and number of threads.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum GemmEpilogue : int32_t {
  GEMM_STORE = 0,     // C = A · Wᵀ
  GEMM_ADD = 1,       // C += A · Wᵀ
  GEMM_SILU_MUL = 2,  // W packed by gemm_pack_pair: C = silu(A · gateᵀ) * (A · upᵀ)
  GEMM_GELU_MUL = 3,  // the same with GELU through tanh
};

struct GemmCall {
  const float* a;  // [rows, inputs]
  int64_t a_stride;
  const void* packed;  // floats, or bf16 for gemm_halves
  float* c;  // [rows, outputs]
  int64_t c_stride;
  int32_t rows;
  int32_t outputs;  // columns of C
  int32_t inputs;
  int32_t epilogue;  // GemmEpilogue
  int32_t threads;
};

int32_t gemm_panel_columns(void);

// Number of floats of a packed W [outputs, inputs], and of a packed pair of such matrices.
int64_t gemm_packed_floats(int32_t outputs, int32_t inputs);
int64_t gemm_packed_pair_floats(int32_t outputs, int32_t inputs);

void gemm_pack(const float* weight, int64_t stride, int32_t outputs, int32_t inputs, float* packed);

// Packs half of each panel from `gate` and half from `up`, both [outputs, inputs].
void gemm_pack_pair(const float* gate, const float* up, int64_t stride, int32_t outputs, int32_t inputs,
                    float* packed);

// Copies row `output` of W from the panels.
void gemm_unpack_row(const float* packed, int32_t inputs, int64_t output, float* row);
void gemm_unpack_row_halves(const uint16_t* packed, int32_t inputs, int64_t output, float* row);

void gemm(const GemmCall* call);

// The same with panels in bf16, for which gemm_pack's results were rounded: the products are of their values.
void gemm_halves(const GemmCall* call);
}
#pragma GCC visibility pop
