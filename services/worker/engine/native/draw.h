// Draws one token per row of logits: temperature, min-p, top-k, top-p, exponential race, as drawing.py in torch.
// Nothing is sorted: thresholds are found digit by digit in histograms.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct Draw {
  int64_t row;         // row of the logits
  float temperature;   // above 0
  float min_p;         // 0: none
  float top_p;         // 1 or more: none
  int32_t top_k;       // 0: none
  uint64_t key;        // hash key of the arrival times
  int64_t token;       // result
};

// Draws a token for each of `draws` from `logits` [rows, vocabulary]; `highest` [rows] are their maxima. A row whose
// maximum is not finite gets any token. `scratch` [vocabulary].
void draw_tokens(const float* logits, const float* highest, int32_t vocabulary, float* scratch, Draw* draws,
                 int32_t count);

// Sets the logits of tokens whose bit is 0 to -inf; `masks` [count, words], lowest bit first, for `rows` [count].
void mask_logits(float* logits, int32_t vocabulary, const int64_t* rows, const uint32_t* masks, int32_t count,
                 int32_t words);

// Finds the highest logit of each of `rows` [count], and its first token, among tokens whose bit is set: -inf if no bit
// is, NaN if a logit among them is NaN. `masks` null: among all tokens.
void find_likeliest(const float* logits, int32_t vocabulary, const int64_t* rows, const uint32_t* masks, int32_t count,
                    int32_t words, int64_t* tokens, float* highest);
}
#pragma GCC visibility pop
