// See llama.h.
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gemm.h"
#include "vector.h"

namespace {

using namespace panels;

int64_t heads_width(const LlamaModel& model) {
  return static_cast<int64_t>(model.q_heads + 2 * model.kv_heads) * model.head_dim;
}

int64_t query_width(const LlamaModel& model) { return static_cast<int64_t>(model.q_heads) * model.head_dim; }

void rms_norm(const float* from, const float* weight, int32_t width, float eps, float* to) {
  Vec squares{};
  int32_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec value = load(from + i);
    squares += value * value;
  }
  float total = sum(squares);
  for (; i < width; ++i) total += from[i] * from[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) store(to + i, load(from + i) * scale * load(weight + i));
  for (; i < width; ++i) to[i] = from[i] * scale * weight[i];
}

// Rotates the halves (a, b) of a head to (a cos - b sin, b cos + a sin).
void rotate(float* head, const float* cosine, const float* sine, int32_t half) {
  int32_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosine[i] - b * sine[i];
    head[half + i] = b * cosine[i] + a * sine[i];
  }
}

void norm_rows(const LlamaModel& model, const LlamaStep& step, const float* weight) {
  for (int64_t row = 0; row < step.rows; ++row)
    rms_norm(step.hidden + row * model.hidden, weight, model.hidden, model.eps, step.normed + row * model.hidden);
}

void project(const LlamaModel& model, int32_t rows, const float* from, int64_t inputs, const float* packed, float* to,
             int64_t outputs, GemmEpilogue epilogue) {
  const GemmCall call{from,
                      inputs,
                      packed,
                      to,
                      outputs,
                      rows,
                      static_cast<int32_t>(outputs),
                      static_cast<int32_t>(inputs),
                      epilogue,
                      model.threads};
  gemm(&call);
}

// Returns the first token with the highest logit. `highest` is NaN if any logit is NaN.
int64_t find_likeliest(const float* logits, int32_t vocabulary, float* highest) {
  Vec most = broadcast(-INFINITY), poison{};
  int32_t i = 0;
  for (; i + kLanes <= vocabulary; i += kLanes) {
    const Vec value = load(logits + i);
    most = value > most ? value : most;
    poison += value * 0.0f;  // NaN for NaN and infinities
  }
  float top = -INFINITY, bad = sum(poison);
  for (int lane = 0; lane < kLanes; ++lane) top = most[lane] > top ? most[lane] : top;
  for (; i < vocabulary; ++i) {
    top = logits[i] > top ? logits[i] : top;
    bad += logits[i] * 0.0f;
  }
  if (bad != bad)
    for (i = 0; i < vocabulary; ++i)
      if (logits[i] != logits[i]) return *highest = logits[i], i;
  *highest = top;
  i = 0;
  for (; i + kLanes <= vocabulary; i += kLanes) {
    const IntVec found = load(logits + i) == top;
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= found[lane];
    if (any) break;
  }
  for (; i < vocabulary; ++i)
    if (logits[i] == top) return i;
  return 0;
}

int32_t check(const LlamaModel& model, const LlamaStep& step) {
  for (int32_t row = 0; row < step.rows; ++row) {
    if (step.tokens[row] < 0 || step.tokens[row] >= model.vocabulary) return LLAMA_BAD_TOKEN;
    if (step.positions[row] < 0 || step.positions[row] >= model.positions) return LLAMA_BAD_POSITION;
  }
  for (int32_t index = 0; index < step.kept; ++index)
    if (step.kept_rows[index] < 0 || step.kept_rows[index] >= step.rows) return LLAMA_BAD_KEPT_ROW;
  return 0;
}

}  // namespace

extern "C" {

int32_t llama_embed(const LlamaModel* model, const LlamaStep* step) {
  if (const int32_t failed = check(*model, *step)) return failed;
  const int64_t hidden = model->hidden;
  for (int64_t row = 0; row < step->rows; ++row) {
    float* to = step->hidden + row * hidden;
    if (model->embedding)
      std::memcpy(to, model->embedding + step->tokens[row] * hidden, sizeof(float) * hidden);
    else
      gemm_unpack_row(model->head, model->hidden, step->tokens[row], to);
  }
  return 0;
}

int32_t llama_layer_qkv(const LlamaModel* model, int32_t layer, const LlamaStep* step) {
  const LlamaLayer& weights = model->layer[layer];
  const int64_t width = heads_width(*model);
  norm_rows(*model, *step, weights.input_norm);
  project(*model, step->rows, step->normed, model->hidden, weights.query_key_value, step->heads, width, GEMM_STORE);
  const int32_t half = model->head_dim / 2;
  for (int64_t row = 0; row < step->rows; ++row) {
    const int64_t turn = step->positions[row] * half;
    for (int64_t head = 0; head < model->q_heads + model->kv_heads; ++head)
      rotate(step->heads + row * width + head * model->head_dim, model->cosine + turn, model->sine + turn, half);
  }
  const float* keys = step->heads + query_width(*model);
  const float* values = keys + static_cast<int64_t>(model->kv_heads) * model->head_dim;
  return kv_write(&weights.pool, keys, width, values, width, step->slots, step->rows);
}

int32_t llama_layer_attend(const LlamaModel* model, int32_t layer, const LlamaStep* step) {
  AttendCall call{};
  call.query = step->heads;
  call.query_stride = heads_width(*model);
  call.q_heads = model->q_heads;
  call.scaling = model->scaling;
  call.output = step->attended;
  call.lse = step->lse;
  call.threads = model->threads;
  return kv_attend(&model->layer[layer].pool, step->spans, &call);
}

static void tap_rows(const LlamaModel& model, const LlamaStep& step) {
  for (int64_t tap = 0; tap < step.taps; ++tap) {
    const int64_t first = step.tap_spans[2 * tap], count = step.tap_spans[2 * tap + 1];
    float* to = step.tapped + tap * model.hidden;
    std::fill(to, to + model.hidden, 0.0f);
    for (int64_t row = first; row < first + count; ++row)
      for (int64_t at = 0; at < model.hidden; ++at) to[at] += step.hidden[row * model.hidden + at];
    for (int64_t at = 0; at < model.hidden; ++at) to[at] /= static_cast<float>(count);
  }
}

void llama_layer_rest(const LlamaModel* model, int32_t layer, const LlamaStep* step) {
  const LlamaLayer& weights = model->layer[layer];
  const int32_t rows = step->rows, hidden = model->hidden;
  project(*model, rows, step->attended, query_width(*model), weights.output, step->hidden, hidden, GEMM_ADD);
  norm_rows(*model, *step, weights.post_norm);
  project(*model, rows, step->normed, hidden, weights.gate_up, step->gated, model->intermediate, GEMM_SILU_MUL);
  project(*model, rows, step->gated, model->intermediate, weights.down, step->hidden, hidden, GEMM_ADD);
  if (layer == step->tap_layer) tap_rows(*model, *step);
}

void llama_logits(const LlamaModel* model, const LlamaStep* step) {
  const int64_t hidden = model->hidden, vocabulary = model->vocabulary;
  for (int64_t index = 0; index < step->kept; ++index)
    rms_norm(step->hidden + step->kept_rows[index] * hidden, model->final_norm, model->hidden, model->eps,
             step->normed + index * hidden);
  project(*model, step->kept, step->normed, hidden, model->head, step->logits, vocabulary, GEMM_STORE);
  for (int64_t index = 0; index < step->kept; ++index)
    step->likeliest[index] =
        find_likeliest(step->logits + index * vocabulary, model->vocabulary, step->highest + index);
}

int32_t llama_forward(const LlamaModel* model, const LlamaStep* step, KvStream* stream, double timeout_s) {
  int32_t failed = llama_embed(model, step);
  for (int32_t layer = 0; layer < model->layers && !failed; ++layer) {
    failed = llama_layer_qkv(model, layer, step);
    if (!failed && stream && stream_enter(stream, layer, timeout_s)) failed = LLAMA_LATE;
    if (!failed) failed = llama_layer_attend(model, layer, step);
    if (!failed && stream) stream_leave(stream, layer);
    if (!failed) llama_layer_rest(model, layer, step);
  }
  if (failed) return failed;
  llama_logits(model, step);
  return 0;
}
}
