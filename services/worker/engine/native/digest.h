// Digests of lent KV blocks: what a creditor checks before it attends to a block, or sends it.
//
// Each block of a layer has one digest for the keys and one for the values of each of its KV heads, which lie in one
// piece (see attention.h). They are taken when the block is written, and compared whenever it is read. 64 bits, by
// rounds of AES: a change within any 64 bytes always shows before the last folding, any other but once in 2^64. Against
// faults, not forgers; not kept beyond the process, for another CPU may compute another function.
#pragma once
#include "attention.h"

namespace kvasir {

uint64_t digest(const void* from, int64_t bytes);  // never 0
uint64_t portable_digest(const void* from, int64_t bytes);  // the same on every CPU, at 8 bytes a cycle

// Whether a head's keys (`which` 0) or values (1) of a block are what was sealed; true for what never was.
bool is_intact(const KvPool& pool, const KvDigests& digests, int64_t block, int kv_head, int which);

}  // namespace kvasir

extern "C" {

KVASIR_API uint64_t kv_digest(const void* from, int64_t bytes);
KVASIR_API int32_t kv_digest_kind();  // names the function that this build computes: 1, 2 …

// Of a table of 64-bit words, `rows` rows of `columns`: the sum of each row and of each column, each times its weight,
// added up modulo 2^64. What services/worker/peers/transport/digest.py computes where there is no library.
KVASIR_API void table_sums(const uint64_t* table, int64_t rows, int64_t columns, const uint64_t* row_weights,
                           const uint64_t* column_weights, uint64_t* by_row, uint64_t* by_column);

// Whether these blocks are what was sealed: 0; else -4, and `bad` is the first that is not. -3: no such block.
KVASIR_API int32_t kv_verify(const KvPool* pool, KvDigests* digests, const int32_t* blocks, int32_t count);

// As kv_write, for blocks with digests: those that are written to are verified before, and sealed afterwards. Answers
// as kv_verify, and has written nothing then.
KVASIR_API int32_t kv_write_sealed(const KvPool* pool, const float* key, int64_t key_stride, const float* value,
                                   int64_t value_stride, const int64_t* slots, int32_t rows, KvDigests* digests);
}
