// See llama.h.
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "grouped.h"
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

void project(const LlamaModel& model, const LlamaStep& step, int32_t rows, const float* from, const Matrix& matrix,
             float* to, int64_t to_stride, int32_t epilogue) {
  matrix_multiply(&matrix, from, matrix.inputs, to, to_stride, rows, epilogue, model.threads, step.rounded);
}

// hidden += A · Wᵀ, normed before it is added if there is a norm.
void add_projected(const LlamaModel& model, const LlamaStep& step, const float* from, const Matrix& matrix,
                   const float* norm) {
  const int64_t hidden = model.hidden;
  if (!norm) return project(model, step, step.rows, from, matrix, step.hidden, hidden, GEMM_ADD);
  project(model, step, step.rows, from, matrix, step.normed, hidden, GEMM_STORE);
  for (int64_t row = 0; row < step.rows; ++row) {
    float* added = step.normed + row * hidden;
    rms_norm(added, norm, model.hidden, model.eps, added);
    for (int64_t i = 0; i < hidden; ++i) step.hidden[row * hidden + i] += added[i];
  }
}

// Turns a row's logits into the weights of its chosen experts; those of others are negative.
void choose_experts(const LlamaModel& model, float* row) {
  const float top = *std::max_element(row, row + model.experts);
  bool taken[LLAMA_MOST_EXPERTS] = {};
  float sum = 0, kept = 0;
  for (int32_t expert = 0; expert < model.experts; ++expert) sum += row[expert] = std::exp(row[expert] - top);
  for (int32_t turn = 0; turn < model.chosen; ++turn) {
    int32_t best = -1;
    for (int32_t expert = 0; expert < model.experts; ++expert)
      if (!taken[expert] && row[expert] >= 0 && (best < 0 || row[expert] > row[best])) best = expert;
    if (best < 0) return;  // not a number
    taken[best] = true;
    kept += row[best];
  }
  for (int32_t expert = 0; expert < model.experts; ++expert)
    row[expert] = taken[expert] ? row[expert] / (model.sums_to_one ? kept : sum) : -1.0f;
}

// hidden += the weighted outputs of each row's experts, by the number of the expert.
void add_experts(const LlamaModel& model, const LlamaStep& step, const LlamaLayer& weights) {
  const int64_t hidden = model.hidden, experts = model.experts;
  float* chosen = step.routed;
  float* inputs = chosen + step.rows * experts;
  float* outputs = inputs + step.rows * hidden;
  project(model, step, step.rows, step.normed, weights.router, chosen, experts, GEMM_STORE);
  for (int64_t row = 0; row < step.rows; ++row) choose_experts(model, chosen + row * experts);
  for (int64_t expert = 0; expert < experts; ++expert) {
    int32_t count = 0;
    for (int64_t row = 0; row < step.rows; ++row)
      if (!(chosen[row * experts + expert] < 0))
        std::copy_n(step.normed + row * hidden, hidden, inputs + hidden * count++);
    if (!count) continue;
    const Matrix& gate_up = weights.experts_gate_up[expert];
    project(model, step, count, inputs, gate_up, step.gated, gate_up.outputs, model.gate);
    project(model, step, count, step.gated, weights.experts_down[expert], outputs, hidden, GEMM_STORE);
    const float* from = outputs;
    for (int64_t row = 0; row < step.rows; ++row) {
      const float weight = chosen[row * experts + expert];
      if (weight < 0) continue;
      for (int64_t i = 0; i < hidden; ++i) step.hidden[row * hidden + i] += weight * from[i];
      from += hidden;
    }
  }
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
    matrix_row(&model->embedding, step->tokens[row], to);
    if (model->embedding_scale != 1.0f)
      for (int64_t i = 0; i < hidden; ++i) to[i] *= model->embedding_scale;
  }
  return 0;
}

int32_t llama_layer_qkv(const LlamaModel* model, int32_t layer, const LlamaStep* step) {
  const LlamaLayer& weights = model->layer[layer];
  const int64_t width = heads_width(*model);
  norm_rows(*model, *step, weights.input_norm);
  float* to = step->heads;
  for (const Matrix& part : weights.query_key_value) {
    if (part.outputs) project(*model, *step, step->rows, step->normed, part, to, width, GEMM_STORE);
    to += part.outputs;
  }
  const int32_t half = model->rotated / 2;
  for (int64_t row = 0; row < step->rows; ++row) {
    const int64_t turn = step->positions[row] * half;
    float* heads = step->heads + row * width;
    if (weights.bias)
      for (int64_t i = 0; i < width; ++i) heads[i] += weights.bias[i];
    for (int64_t head = 0; head < model->q_heads + model->kv_heads; ++head) {
      float* own = heads + head * model->head_dim;
      const float* norm = head < model->q_heads ? weights.query_norm : weights.key_norm;
      if (norm) rms_norm(own, norm, model->head_dim, model->eps, own);
      rotate(own, weights.cosine + turn, weights.sine + turn, half);
    }
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
  call.softcap = model->softcap;
  call.output = step->attended;
  call.lse = step->lse;
  call.threads = model->threads;
  Spans spans = *step->spans;
  spans.window_tokens = model->layer[layer].window_tokens;
  return kv_attend(&model->layer[layer].pool, &spans, &call);
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
  add_projected(*model, *step, step->attended, weights.output, weights.attended_norm);
  norm_rows(*model, *step, weights.post_norm);
  if (weights.router.outputs) {
    add_experts(*model, *step, weights);
  } else {
    project(*model, *step, step->rows, step->normed, weights.gate_up, step->gated, weights.gate_up.outputs, model->gate);
    add_projected(*model, *step, step->gated, weights.down, weights.mlp_norm);
  }
  if (layer == step->tap_layer) tap_rows(*model, *step);
}

void llama_logits(const LlamaModel* model, const LlamaStep* step) {
  const int64_t hidden = model->hidden, vocabulary = model->vocabulary;
  for (int64_t index = 0; index < step->kept; ++index)
    rms_norm(step->hidden + step->kept_rows[index] * hidden, model->final_norm, model->hidden, model->eps,
             step->normed + index * hidden);
  project(*model, *step, step->kept, step->normed, model->head, step->logits, vocabulary, GEMM_STORE);
  if (const float cap = model->logits_softcap)
    for (int64_t i = 0; i < step->kept * vocabulary; ++i) step->logits[i] = cap * std::tanh(step->logits[i] / cap);
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
