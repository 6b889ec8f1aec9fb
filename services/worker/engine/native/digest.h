// Digests of lent KV blocks, which a creditor checks before it attends to a block or sends it.
//
// Keys and values of each KV head of a block and layer have one digest each, set on write and checked on read. It has
// 64 bits, by AES rounds: a change within 64 bytes always shows before the last folding; others are missed once in
// 2^64. Digests detect faults, not attacks. They are not stored, because another CPU may compute another function.
#pragma once
#include "attention.h"

namespace kvasir {

uint64_t digest(const void* from, int64_t bytes);  // never 0
uint64_t portable_digest(const void* from, int64_t bytes);  // the same on every CPU, 8 bytes per cycle

// Returns whether a head's keys (`which` 0) or values (1) of a block match their digest; true without a digest.
bool is_intact(const KvPool& pool, const KvDigests& digests, int64_t block, int kv_head, int which);

}  // namespace kvasir

extern "C" {

KVASIR_API uint64_t kv_digest(const void* from, int64_t bytes);
KVASIR_API int32_t kv_digest_kind();  // number of the digest function of this build

// Computes the weighted row and column sums of a table of 64-bit words, modulo 2^64, as
// services/worker/peers/transport/digest.py does without the library.
KVASIR_API void table_sums(const uint64_t* table, int64_t rows, int64_t columns, const uint64_t* row_weights,
                           const uint64_t* column_weights, uint64_t* by_row, uint64_t* by_column);

// Returns 0 if these blocks match their digests, -4 and the first wrong block in `bad` if not, -3 for a wrong id.
KVASIR_API int32_t kv_verify(const KvPool* pool, KvDigests* digests, const int32_t* blocks, int32_t count);

// kv_write for blocks with digests: verifies them before and updates their digests after the write. Returns as
// kv_verify; on an error nothing is written.
KVASIR_API int32_t kv_write_sealed(const KvPool* pool, const float* key, int64_t key_stride, const float* value,
                                   int64_t value_stride, const int64_t* slots, int32_t rows, KvDigests* digests);
}
