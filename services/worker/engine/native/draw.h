// One token for a row of logits: temperature, min-p, top-k, top-p, and a race of what is left. What drawing.py does
// in torch, without putting anything in order: thresholds are found digit by digit in histograms.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct Draw {
  int64_t row;         // of the logits
  float temperature;   // above 0
  float min_p;         // 0: none
  float top_p;         // 1 or more: none
  int32_t top_k;       // 0: none
  uint64_t key;        // of the tokens' times
  int64_t token;       // the answer
};

// `logits` [rows, vocabulary] with their highest values [rows], finite (a row that has others gets any token);
// `scratch` [vocabulary] floats.
void draw_tokens(const float* logits, const float* highest, int32_t vocabulary, float* scratch, Draw* draws,
                 int32_t count);

// Minus infinity for each token whose bit is 0: `masks` [count, words], the lowest bit first, of the rows `rows` [count].
void mask_logits(float* logits, int32_t vocabulary, const int64_t* rows, const uint32_t* masks, int32_t count,
                 int32_t words);

// Of each of `rows` [count] the first of the likeliest `tokens` among those whose bit is set, and its logit: minus
// infinity where no bit is, NaN where a logit among them is. Without `masks` (null) of all tokens.
void find_likeliest(const float* logits, int32_t vocabulary, const int64_t* rows, const uint32_t* masks, int32_t count,
                    int32_t words, int64_t* tokens, float* highest);
}
#pragma GCC visibility pop
