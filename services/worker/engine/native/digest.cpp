// See digest.h.
#include "digest.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"

#if defined(KVASIR_AVX512) && defined(__VAES__)
#define KVASIR_VAES 1
#endif

namespace kvasir {
namespace {

constexpr uint64_t SEEDS[8] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb, 0xd6e8feb86659fd93,
                               0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};

uint64_t mixed(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

// Each word is mixed in by an odd multiplication and a rotation, which are invertible; four states alternate.
uint64_t digest_words(const char* from, int64_t bytes) {
  uint64_t state[4] = {SEEDS[0], SEEDS[1], SEEDS[2], SEEDS[3]};
  auto enter = [&](int turn, const char* at, int64_t some) __attribute__((always_inline)) {
    uint64_t word = 0;
    std::memcpy(&word, at, some);
    const uint64_t entered = (state[turn] ^ word) * SEEDS[4];
    state[turn] = entered << 31 | entered >> 33;
  };
  int64_t at = 0;
  for (; at + 32 <= bytes; at += 32)
    for (int turn = 0; turn < 4; turn++) enter(turn, from + at + 8 * turn, 8);
  for (int turn = 0; at < bytes; at += 8, turn++) enter(turn, from + at, std::min<int64_t>(8, bytes - at));
  uint64_t found = (uint64_t)bytes;
  for (int turn = 0; turn < 4; turn++)
    found = mixed(found ^ state[turn] ^ SEEDS[6], SEEDS[5] + (uint64_t)turn) + state[turn];
  return found;
}

#ifdef KVASIR_VAES
constexpr int32_t KIND = 2;

// Four states alternate, because a round must end before the next one of the same state begins.
uint64_t digest_lines(const char* from, int64_t bytes) {
  const __m512i seed = _mm512_loadu_si512(SEEDS);
  __m512i a = seed, b = _mm512_ror_epi64(seed, 17), c = _mm512_ror_epi64(seed, 31), d = _mm512_ror_epi64(seed, 47);
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
    a = _mm512_aesenc_epi128(a, _mm512_loadu_si512(from + at));
    b = _mm512_aesenc_epi128(b, _mm512_loadu_si512(from + at + 64));
    c = _mm512_aesenc_epi128(c, _mm512_loadu_si512(from + at + 128));
    d = _mm512_aesenc_epi128(d, _mm512_loadu_si512(from + at + 192));
  }
  for (; at < bytes; at += 64) {
    const int64_t left = std::min<int64_t>(64, bytes - at);
    a = _mm512_aesenc_epi128(a, _mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - left), from + at));
  }
  a = _mm512_aesenc_epi128(_mm512_aesenc_epi128(a, b), _mm512_aesenc_epi128(c, d));
  __m256i half = _mm256_aesenc_epi128(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  __m128i quarter = _mm_aesenc_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i length = _mm_set_epi64x((int64_t)SEEDS[0], bytes);
  quarter = _mm_aesenc_si128(_mm_aesenc_si128(quarter, length), _mm512_castsi512_si128(seed));
  return (uint64_t)_mm_cvtsi128_si64(quarter) ^ (uint64_t)_mm_extract_epi64(quarter, 1);
}

#else
constexpr int32_t KIND = 1;

uint64_t digest_lines(const char* from, int64_t bytes) { return digest_words(from, bytes); }

#endif

int64_t element_bytes(const KvPool& pool) { return pool.dtype == KV_FP32 ? 4 : pool.dtype == KV_BF16 ? 2 : 1; }
int64_t scale_bytes(const KvPool& pool) { return pool.dtype == KV_INT8 ? KV_SCALE_BYTES : 0; }

struct Piece {
  const char* from;
  int64_t bytes;
};

Piece piece(const KvPool& pool, int64_t block, int kv_head, int which) {
  const int64_t dim = which ? pool.value_dim : pool.head_dim;
  const int64_t bytes = (dim * element_bytes(pool) + scale_bytes(pool)) * pool.block_tokens;
  const char* pieces = static_cast<const char*>(which ? pool.value : pool.key);
  return {pieces + (block * pool.kv_heads + kv_head) * bytes, bytes};
}

uint64_t& entry(const KvPool& pool, const KvDigests& digests, int64_t block, int kv_head, int which) {
  return digests.of[(block * pool.kv_heads + kv_head) * 2 + which];
}

bool is_whole_intact(const KvPool& pool, const KvDigests& digests, int64_t block) {
  for (int head = 0; head < pool.kv_heads; head++)
    for (int which = 0; which < 2; which++)
      if (!is_intact(pool, digests, block, head, which)) return false;
  return true;
}

}  // namespace

uint64_t digest(const void* from, int64_t bytes) {
  const uint64_t found = digest_lines(static_cast<const char*>(from), bytes);
  return found ? found : 1;
}

uint64_t portable_digest(const void* from, int64_t bytes) { return digest_words(static_cast<const char*>(from), bytes); }

bool is_intact(const KvPool& pool, const KvDigests& digests, int64_t block, int kv_head, int which) {
  const uint64_t sealed = entry(pool, digests, block, kv_head, which);
  const Piece found = piece(pool, block, kv_head, which);
  return !sealed || sealed == digest(found.from, found.bytes);
}

}  // namespace kvasir

using namespace kvasir;

extern "C" uint64_t kv_digest(const void* from, int64_t bytes) { return digest(from, bytes); }
extern "C" int32_t kv_digest_kind() { return KIND; }

extern "C" void table_sums(const uint64_t* table, int64_t rows, int64_t columns, const uint64_t* row_weights,
                           const uint64_t* column_weights, uint64_t* by_row, uint64_t* by_column) {
  // A few columns at a time stay in registers; the table is a slice that fits into the cache.
  constexpr int64_t STRIP = 64;
  static thread_local std::vector<uint64_t> of_row;
  of_row.assign((size_t)rows, 0);
  uint64_t found = 0;
  for (int64_t first = 0; first < columns; first += STRIP) {
    const int64_t width = std::min(STRIP, columns - first);
    uint64_t of_column[STRIP] = {};
    for (int64_t row = 0; row < rows; row++) {
      const uint64_t* words = table + row * columns + first;
      uint64_t sum = 0;
      if (width == STRIP)
        for (int64_t i = 0; i < STRIP; i++) {
          of_column[i] += words[i];
          sum += words[i];
        }
      else
        for (int64_t i = 0; i < width; i++) {
          of_column[i] += words[i];
          sum += words[i];
        }
      of_row[row] += sum;
    }
    for (int64_t i = 0; i < width; i++) found += of_column[i] * column_weights[first + i];
  }
  *by_column = found;
  *by_row = 0;
  for (int64_t row = 0; row < rows; row++) *by_row += of_row[row] * row_weights[row];
}

extern "C" int32_t kv_verify(const KvPool* pool, KvDigests* digests, const int32_t* blocks, int32_t count) {
  for (int32_t i = 0; i < count; i++) {
    if (blocks[i] < 0 || blocks[i] >= pool->num_blocks) return -3;
    if (!is_whole_intact(*pool, *digests, blocks[i])) {
      digests->bad = blocks[i];
      return -4;
    }
  }
  return 0;
}

extern "C" int32_t kv_write_sealed(const KvPool* pool, const float* key, int64_t key_stride, const float* value,
                                   int64_t value_stride, const int64_t* slots, int32_t rows, KvDigests* digests) {
  static thread_local std::vector<int32_t> touched;
  touched.clear();
  for (int32_t row = 0; row < rows; row++) {
    if (slots[row] < -1 || slots[row] >= (int64_t)pool->num_blocks * pool->block_tokens) return -3;
    if (slots[row] >= 0) touched.push_back((int32_t)(slots[row] / pool->block_tokens));
  }
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  int32_t failed = kv_verify(pool, digests, touched.data(), (int32_t)touched.size());
  failed = failed ? failed : kv_write(pool, key, key_stride, value, value_stride, slots, rows);
  if (failed) return failed;
  for (int32_t block : touched)
    for (int head = 0; head < pool->kv_heads; head++)
      for (int which = 0; which < 2; which++) {
        const Piece written = piece(*pool, block, head, which);
        entry(*pool, *digests, block, head, which) = digest(written.from, written.bytes);
      }
  return 0;
}
