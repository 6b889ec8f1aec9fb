// Joining attention over parts of the keys: exact, whatever the partition and its order (Infinite-LLM §4).
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Join a part into results: `output` [rows, heads, value_dim] normalised with `lse` [rows, heads], in place, and the
// part's [count, heads, value_dim] and [count, heads], which belong to the rows named by `rows` [count]. −inf: saw no
// key. fp32, contiguous.
void kv_merge(float* output, float* lse, const float* part, const float* part_lse, const int64_t* rows,
              int32_t count, int32_t heads, int32_t value_dim);
}
#pragma GCC visibility pop
