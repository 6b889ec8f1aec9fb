// Merges attention over parts of the keys; exact for any partition and order (Infinite-LLM §4).
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Merges `part` [count, heads, value_dim] and `part_lse` [count, heads] of `rows` [count] into `output` [rows, heads,
// value_dim] and `lse` [rows, heads], in place. Log-sum-exp −inf: no key seen. All fp32, contiguous.
void kv_merge(float* output, float* lse, const float* part, const float* part_lse, const int64_t* rows,
              int32_t count, int32_t heads, int32_t value_dim);
}
#pragma GCC visibility pop
