// Attention over paged KV, for decode, chunked prefill and partial (distributed) attention.
//
// Pools of one layer: K [num_blocks, kv_heads, head_dim, block_tokens], V [num_blocks, kv_heads, block_tokens,
// value_dim], fp32, bf16 or int8. Of int8, a slot and head has a scale for its key and one for its value, fp32: behind the
// keys of a block and head, [block_tokens]; behind each value, so that its row has value_dim + 4 bytes.
// Queries fp32 [rows, q_heads, head_dim]; query head h reads KV head h / (q_heads / kv_heads). Output fp32 [rows, q_heads, value_dim], normalised; log-sum-exp fp32
// [rows, q_heads]: ln sum exp(scaling * q.k). A row that sees no key gets zeros and -inf.
#pragma once
#include <cstdint>

#define KVASIR_API __attribute__((visibility("default")))

extern "C" {

enum KvDtype : int32_t { KV_FP32 = 0, KV_BF16 = 1, KV_INT8 = 2 };
enum : int32_t { KV_SCALE_BYTES = 4 };

struct KvPool {
  void* key;
  void* value;
  int32_t dtype;  // KvDtype
  int32_t num_blocks;
  int32_t before;  // readable blocks before block 0 in the same memory: ids down to -before are valid
  int32_t block_tokens;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_dim;
};

// Spans of packed rows, one sequence each. Span s has rows [first_row[s], first_row[s + 1]); its row i
// is at position first_position[s] + i and sees keys at positions
//   [max(table_position[s], position - window_tokens + 1 if window_tokens), min(position + 1, key_end[s])).
struct Spans {
  int32_t count;
  const int32_t* first_row;       // [count + 1]
  const int32_t* first_position;  // [count]
  const int32_t* table_start;     // [count]: offset of the span's block table in `blocks`
  const int32_t* table_position;  // [count]: position of the first slot of the first block, a multiple of block_tokens
  const int32_t* key_end;         // [count]: one past the last position whose key is in the table
  const int32_t* blocks;          // block ids, from -before to num_blocks - 1
  int32_t window_tokens;          // 0: no window
};

// Digests of the blocks of one layer's pool; see digest.h.
struct KvDigests {
  uint64_t* of;  // [num_blocks, kv_heads, 2]: digests of keys and values; 0: none
  int32_t bad;   // first block that does not match its digest, after a result of -4
};

struct AttendCall {
  const float* query;
  int64_t query_stride;  // elements between rows; heads are contiguous
  int32_t q_heads;
  float scaling;
  float softcap;  // 0: none
  float* output;  // [rows, q_heads, value_dim], contiguous
  float* lse;     // [rows, q_heads], or null
  int32_t threads;
  KvDigests* digests;  // verifies blocks before they are read; or null
};

// Returns 0, a negative number for unsupported arguments (see library.py), or -4 with an invalid output if a block does
// not match its digest. Without digests it reads only columns of sixteen slots of which a row sees one.
// A row gives the same bits in any batch and chunk.
KVASIR_API int32_t kv_attend(const KvPool* pool, const Spans* spans, const AttendCall* call);

// Writes K and V [rows, kv_heads, dim] (fp32, row strides in elements) to their slots (block * block_tokens + offset);
// skips rows with slot -1, which another worker stores.
KVASIR_API int32_t kv_write(const KvPool* pool, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                 const int64_t* slots, int32_t rows);
}
