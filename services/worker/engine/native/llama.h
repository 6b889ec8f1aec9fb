// One step of a Llama in fp32: packed rows of tokens in, logits of the kept rows out.
//
// llama_forward is llama_embed, then for every layer llama_layer_qkv, llama_layer_attend and llama_layer_rest, then
// llama_logits. Callers use the parts for distributed attention. Nothing is allocated or kept between calls.
#pragma once
#include <cstdint>

#include "attention.h"
#include "stream.h"

#pragma GCC visibility push(default)
extern "C" {

struct LlamaLayer {
  const float* input_norm;       // [hidden]
  const float* query_key_value;  // packed [(q_heads + 2 * kv_heads) * head_dim, hidden]
  const float* output;           // packed [hidden, q_heads * head_dim]
  const float* post_norm;        // [hidden]
  const float* gate_up;          // packed as a pair [intermediate, hidden]
  const float* down;             // packed [hidden, intermediate]
  KvPool pool;
};

struct LlamaModel {
  int32_t layers;
  int32_t hidden;
  int32_t intermediate;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t vocabulary;
  int32_t positions;  // rows of cosine and sine
  int32_t threads;
  float eps;
  float scaling;           // of attention scores
  const float* embedding;  // [vocabulary, hidden], or null: the rows of `head` (tied)
  const float* final_norm;
  const float* head;    // packed [vocabulary, hidden]
  const float* cosine;  // [positions, head_dim / 2], scaled as in the model's rotary embedding
  const float* sine;
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
