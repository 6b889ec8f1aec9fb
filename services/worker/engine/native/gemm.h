// fp32 matrix products for packed rows of activations and weights packed once: C = A · Wᵀ, with what follows fused.
//
// A weight matrix W [outputs, inputs] is held as panels of gemm_panel_columns() outputs, each panel
// [inputs][columns], the last one padded with zeros. Every output is one chain of fused multiply-adds in the order
// of the inputs, whatever the number of rows, the blocking or the threads: a row's result does not depend on what
// else is in the batch, bit for bit.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum GemmEpilogue : int32_t {
  GEMM_STORE = 0,     // C = A · Wᵀ
  GEMM_ADD = 1,       // C += A · Wᵀ
  GEMM_SILU_MUL = 2,  // W packed by gemm_pack_pair: C = silu(A · gateᵀ) * (A · upᵀ)
};

struct GemmCall {
  const float* a;  // [rows, inputs]
  int64_t a_stride;
  const float* packed;
  float* c;  // [rows, outputs]
  int64_t c_stride;
  int32_t rows;
  int32_t outputs;  // columns of C
  int32_t inputs;
  int32_t epilogue;  // GemmEpilogue
  int32_t threads;
};

int32_t gemm_panel_columns(void);

// Floats that a packed W [outputs, inputs] takes; for a pair, pass twice the outputs padded to whole half panels:
// gemm_packed_pair_floats.
int64_t gemm_packed_floats(int32_t outputs, int32_t inputs);
int64_t gemm_packed_pair_floats(int32_t outputs, int32_t inputs);

void gemm_pack(const float* weight, int64_t stride, int32_t outputs, int32_t inputs, float* packed);

// Half of each panel from `gate`, half from `up`, both [outputs, inputs].
void gemm_pack_pair(const float* gate, const float* up, int64_t stride, int32_t outputs, int32_t inputs,
                    float* packed);

// Row `output` of W, read back out of the panels.
void gemm_unpack_row(const float* packed, int32_t inputs, int64_t output, float* row);

void gemm(const GemmCall* call);
}
#pragma GCC visibility pop
