// Random steps through the attention operator in a process of its own, for sanitizers: pools are exactly as large as
// they must be, and under AddressSanitizer every slot that no row sees is poisoned. Compares with the definition.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "digest.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(at, bytes) __asan_poison_memory_region(at, bytes)
#define UNPOISON(at, bytes) __asan_unpoison_memory_region(at, bytes)
#else
#define POISON(at, bytes) (void)(at)
#define UNPOISON(at, bytes) (void)(at)
#endif

static std::mt19937 dice(7);
static int pick(std::initializer_list<int> from) { return from.begin()[dice() % from.size()]; }
static float normal() { return std::normal_distribution<float>()(dice); }

template <class T>
static float widen(T x) {
  if (sizeof(T) == 4) return (float)x;
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

template <class T>
static double run_case() {
  const int tokens = pick({2, 4, 8, 16, 24, 32}), kv_heads = pick({1, 2, 3}), group = pick({1, 2, 3, 4, 7, 36});
  const int head_dim = pick({6, 32, 64, 80, 112, 128}), value_dim = pick({6, 16, 40, 64, 80, 112, 128});
  const int window = pick({0, 0, 1, 5, 40}), q_heads = kv_heads * group, count = 1 + dice() % 3;
  const float softcap = pick({0, 0, 3}), scaling = 0.15f;
  std::vector<int32_t> first_row{0}, first, start, base, end, table;
  int blocks = 0;
  for (int s = 0; s < count; s++) {
    first.push_back(dice() % 100);
    first_row.push_back(first_row.back() + pick({1, 1, 2, 40}));
    end.push_back(first.back() + first_row[s + 1] - first_row[s]);
    start.push_back((int)table.size());
    base.push_back(0);
    const int needed = (end.back() + tokens - 1) / tokens;
    const int unseen = window ? std::max(0, first.back() - window + 1) / tokens : 0;
    for (int b = 0; b < needed; b++) table.push_back(b < unseen ? 0x7fffffff : blocks++);
  }
  const int rows = first_row.back();
  const size_t key_size = (size_t)blocks * kv_heads * head_dim * tokens;
  const size_t value_size = (size_t)blocks * kv_heads * value_dim * tokens;
  T* key = (T*)std::malloc(key_size * sizeof(T));
  T* value = (T*)std::malloc(value_size * sizeof(T));
  std::vector<float> query((size_t)rows * q_heads * head_dim), output((size_t)rows * q_heads * value_dim);
  std::vector<float> lse((size_t)rows * q_heads);
  for (float& x : query) x = normal();
  const KvPool pool{key, value, sizeof(T) == 4 ? KV_FP32 : KV_BF16, blocks, 0, tokens, kv_heads, head_dim, value_dim};

  // Every key that some row sees is written through the operator; the rest of the memory stays unreadable.
  std::vector<char> seen((size_t)blocks * tokens);
  std::vector<int64_t> slots;
  for (int s = 0; s < count; s++) {
    for (int at = window ? std::max(0, first[s] - window + 1) : 0; at < end[s]; at++) {
      slots.push_back((int64_t)table[start[s] + at / tokens] * tokens + at % tokens);
      seen[slots.back()] = 1;
    }
  }
  std::vector<float> new_key(slots.size() * kv_heads * head_dim), new_value(slots.size() * kv_heads * value_dim);
  for (float& x : new_key) x = normal();
  for (float& x : new_value) x = normal();
  if (kv_write(&pool, new_key.data(), kv_heads * head_dim, new_value.data(), kv_heads * value_dim, slots.data(),
               (int)slots.size()))
    return INFINITY;
  for (size_t slot = 0; slot < seen.size(); slot++) {
    if (seen[slot]) continue;
    for (int h = 0; h < kv_heads; h++) {
      const size_t at = slot / tokens * kv_heads + h, offset = slot % tokens;
      // ASan forbids the end of eight bytes, not their beginning: only what is unseen up to the row's end.
      bool last = true;
      for (size_t next = slot; next / tokens == slot / tokens && last; next++) last = !seen[next];
      if (last)
        for (int d = 0; d < head_dim; d++)
          POISON(key + (at * head_dim + d) * tokens + offset, (tokens - offset) * sizeof(T));
      POISON(value + (at * tokens + offset) * value_dim, value_dim * sizeof(T));
    }
  }
  const Spans spans{count,      first_row.data(), first.data(), start.data(),
                    base.data(), end.data(),       table.data(), window};
  const AttendCall call{query.data(), (int64_t)q_heads * head_dim, q_heads, scaling, softcap,
                        output.data(), lse.data(), pick({1, 2})};
  const int answer = kv_attend(&pool, &spans, &call);
  UNPOISON(key, key_size * sizeof(T));
  UNPOISON(value, value_size * sizeof(T));
  if (answer) return INFINITY;

  // Sealed, it answers the same, and nothing at all once a byte of a block that some row sees has changed.
  std::vector<uint64_t> seals((size_t)blocks * kv_heads * 2);
  KvDigests digests{seals.data(), -1};
  if (kv_write_sealed(&pool, new_key.data(), kv_heads * head_dim, new_value.data(), kv_heads * value_dim, slots.data(),
                      (int)slots.size(), &digests))
    return INFINITY;
  std::vector<float> again(output.size()), again_lse(lse.size());
  AttendCall sealed = call;
  sealed.output = again.data();
  sealed.lse = again_lse.data();
  sealed.digests = &digests;
  if (kv_attend(&pool, &spans, &sealed) || again != output || again_lse != lse) return INFINITY;
  const int64_t block = slots[dice() % slots.size()] / tokens;
  const bool is_value = dice() % 2;
  const size_t block_bytes = (is_value ? value_size : key_size) / blocks * sizeof(T);
  char* changed = (char*)(is_value ? value : key) + block * block_bytes + dice() % block_bytes;
  const char flipped = (char)(1 << dice() % 8);
  *changed ^= flipped;
  if (kv_attend(&pool, &spans, &sealed) != -4 || digests.bad != block) return INFINITY;
  *changed ^= flipped;

  double worst = 0;
  for (int s = 0; s < count; s++)
    for (int row = first_row[s]; row < first_row[s + 1]; row++)
      for (int head = 0; head < q_heads; head++) {
        const int position = first[s] + row - first_row[s];
        double total = 0;
        std::vector<double> sum(value_dim);
        for (int at = window ? std::max(0, position - window + 1) : 0; at <= position; at++) {
          const size_t block = (size_t)table[start[s] + at / tokens] * kv_heads + head / group;
          double score = 0;
          for (int d = 0; d < head_dim; d++)
            score += (double)query[((size_t)row * q_heads + head) * head_dim + d] *
                     widen(key[(block * head_dim + d) * tokens + at % tokens]);
          score *= scaling;
          if (softcap != 0) score = softcap * std::tanh(score / softcap);
          const double weight = std::exp(score);
          total += weight;
          for (int d = 0; d < value_dim; d++)
            sum[d] += weight * widen(value[(block * tokens + at % tokens) * value_dim + d]);
        }
        const size_t at = (size_t)row * q_heads + head;
        worst = std::max(worst, std::fabs(std::log(total) - lse[at]));
        for (int d = 0; d < value_dim; d++)
          worst = std::max(worst, std::fabs(sum[d] / total - output[at * value_dim + d]));
      }
  std::free(key);
  std::free(value);
  return worst;
}

int main(int, char** arguments) {
  double worst = 0;
  for (int i = std::atoi(arguments[1]); i > 0; i--)
    worst = std::max(worst, i % 2 ? run_case<float>() : run_case<uint16_t>());
  std::printf("%g\n", worst);
  return worst < 2e-5 ? 0 : 1;
}
