// One step of a decoder of Llama's kind with activations in fp32: packed rows of tokens in, logits of the kept rows out.
//
// llama_forward is llama_embed, then for every layer llama_layer_qkv, llama_layer_attend and llama_layer_rest, then
// llama_logits. Callers use the parts for distributed attention. Nothing is allocated or kept between calls.
#pragma once
#include <cstdint>

#include "attention.h"
#include "grouped.h"
#include "stream.h"

#pragma GCC visibility push(default)
extern "C" {

// What a layer is made of. What a family has not is null.
struct LlamaLayer {
  const float* input_norm;     // [hidden]
  const float* query_norm;     // [head_dim]: of each head before its rotation
  const float* key_norm;       // [head_dim]
  const float* attended_norm;  // [hidden]: of the attention's output before it is added
  const float* post_norm;      // [hidden]: before the MLP
  const float* mlp_norm;       // [hidden]: of the MLP's output before it is added
  const float* bias;           // [(q_heads + 2 * kv_heads) * head_dim]: of queries, keys and values
  const float* cosine;         // [positions, rotated / 2], scaled as in the model's rotary embedding
  const float* sine;
  Matrix query_key_value[3];  // one after the other [(q_heads + 2 * kv_heads) * head_dim, hidden]; or one and zeros
  Matrix output;              // [hidden, q_heads * head_dim]
  Matrix gate_up;             // a pair [intermediate, hidden]
  Matrix down;                // [hidden, intermediate]
  Matrix router;              // [experts, hidden]; no outputs: the layer has the two above instead of experts
  const Matrix* experts_gate_up;  // [experts]
  const Matrix* experts_down;     // [experts]
  int32_t window_tokens;      // sliding window; 0: none
  KvPool pool;
};

struct LlamaModel {
  int32_t layers;
  int32_t hidden;
  int32_t intermediate;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rotated;  // first dimensions of a head that are rotated
  int32_t vocabulary;
  int32_t positions;  // rows of cosine and sine
  int32_t gate;       // GEMM_SILU_MUL or GEMM_GELU_MUL
  int32_t experts;
  int32_t chosen;         // experts of a row
  int32_t sums_to_one;    // whether the chosen experts' weights do
  int32_t threads;
  float eps;
  float scaling;          // of attention scores
  float softcap;          // of attention scores; 0: none
  float logits_softcap;   // 0: none
  float embedding_scale;  // 1: none
  Matrix embedding;       // [vocabulary, hidden]; `head` again if tied
  const float* final_norm;
  Matrix head;  // [vocabulary, hidden]
  const LlamaLayer* layer;
};

struct LlamaStep {
  int32_t rows;
  int32_t kept;
  const int64_t* tokens;     // [rows]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows]: slots for K and V
  const int64_t* kept_rows;  // [kept]
  const Spans* spans;
  // Scratch, [max(rows, kept), …] each, contiguous:
  float* hidden;    // … hidden: the residual stream
  float* normed;    // … hidden
  float* heads;     // … (q_heads + 2 * kv_heads) * head_dim: queries, keys, values
  float* attended;  // … q_heads * head_dim
  float* gated;     // … intermediate
  float* lse;       // … q_heads: log-sum-exp of attended, as in kv_attend; or null
  float* rounded;   // … matrix_scratch of the widest matrix
  float* routed;    // … experts + 2 * hidden, if there are experts
  // Results:
  float* logits;       // [kept, vocabulary]
  int64_t* likeliest;  // [kept]: first token with the highest logit
  float* highest;      // [kept]: that logit; NaN if any logit is NaN
  // Hidden states after layer `tap_layer`; none if `taps` is 0:
  int32_t tap_layer;
  int32_t taps;
  const int64_t* tap_spans;  // [taps, 2]: first row and number of rows
  float* tapped;             // [taps, hidden]: means of their residual streams
};

constexpr int32_t LLAMA_MOST_EXPERTS = 512;

enum LlamaError : int32_t { LLAMA_BAD_TOKEN = -101, LLAMA_BAD_POSITION = -102, LLAMA_BAD_KEPT_ROW = -103, LLAMA_LATE = -104 };

// hidden = embedding of the tokens. Returns 0, or a LlamaError for an index in `step` that is out of range.
int32_t llama_embed(const LlamaModel* model, const LlamaStep* step);

// heads = rotated queries and keys, and values, of the normed hidden; writes keys and values to the layer's pool.
// Returns the result of kv_write.
int32_t llama_layer_qkv(const LlamaModel* model, int32_t layer, const LlamaStep* step);

// attended (and lse unless null) = attention of the queries over the layer's pool. Returns the result of kv_attend.
int32_t llama_layer_attend(const LlamaModel* model, int32_t layer, const LlamaStep* step);

// hidden += output projection of attended, then hidden += MLP of the normed hidden; fills tapped after `tap_layer`.
void llama_layer_rest(const LlamaModel* model, int32_t layer, const LlamaStep* step);

// Fills logits, likeliest and highest of the kept rows.
void llama_logits(const LlamaModel* model, const LlamaStep* step);

// Runs a whole step. Returns 0 or the first error of a part. With a `stream` (or null) on which the step has begun,
// layers wait for their host blocks: LLAMA_LATE after `timeout_s`.
int32_t llama_forward(const LlamaModel* model, const LlamaStep* step, KvStream* stream, double timeout_s);
}
#pragma GCC visibility pop
