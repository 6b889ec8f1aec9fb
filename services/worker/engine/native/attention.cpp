// The operator of attention.h: online softmax (FlashAttention) over columns of sixteen slots.
//
// A tile is the query heads that share one KV head, over one or several rows of a span. It processes its keys in chunks
// of columns: scores, softmax with the running maximum, weighted values. Each phase prefetches the data of the next,
// because blocks are scattered and hardware prefetching stops at page borders.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "digest.h"
#include "lanes.h"

namespace {

using namespace kvasir;

constexpr int CHUNK_COLUMNS = 8;
constexpr int CHUNK = CHUNK_COLUMNS * LANES;  // scores of one query and chunk
constexpr int CHUNK_BYTES = 32768;            // of keys, so that prefetched data stays in the L2 cache
constexpr int TILE = 32;                      // queries of a tile
constexpr int ROWS = 4;                       // queries of a register tile
template <class T>
constexpr int SCALED = sizeof(T) == 1 ? KV_SCALE_BYTES : 0;  // bytes, and elements, of a scale
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

// Up to sixteen consecutive slots of one block. Offsets are in elements, for KV head 0.
struct Column {
  int64_t key;
  int64_t value;
  int32_t position;
  int32_t lanes;
};

struct Tile {
  int32_t span;
  int32_t row;  // first packed row
  int32_t rows;
  int32_t head;  // first query head of the KV head
  int32_t heads;
  bool verifies;  // whether to check digests of this KV head: set for a span's last tile, which sees all its keys
};

// Buffers of one thread, kept between calls.
struct Workspace {
  std::vector<Column> columns;
  std::vector<int32_t> blocks;  // block id of each column that is the first of its block, else -1
  std::vector<float> memory;
  const Tile* tile = nullptr;
  float *query, *output, *scores, *highest, *total, *decay;

  void reserve(int head_dim, int value_stride) {
    size_t needed = TILE * (size_t)(head_dim + value_stride + CHUNK + 3) + 6 * LANES;
    if (memory.size() < needed) memory.resize(needed);
    auto aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63);
    query = reinterpret_cast<float*>(aligned);
    output = query + (TILE * head_dim + 15) / 16 * 16;
    scores = output + TILE * value_stride;
    highest = scores + TILE * CHUNK;
    total = highest + TILE;
    decay = total + TILE;
  }
};

// Loads sixteen values, or the first `lanes` of them and zeros.
template <bool SOME, class T>
inline void load_up_to(const T* from, int lanes, Part (&parts)[PARTS]) {
  if (!SOME) return load_parts(from, parts);
  float some[LANES];
  store(some, load_some(from, lanes));
  load_parts(some, parts);
}

// Computes scores of `M` queries and `N` columns. Products are summed in the order of the dimensions, whatever `M` and `N`,
// so that a score is the same in any batch.
template <class T, int M, int N, bool PARTIAL>
inline void score_columns(const float* query, int head_dim, const T* const* keys, int64_t stride, int lanes,
                          const T* const* ahead, float* scores) {
  Part sum[M][N][PARTS] = {};
  for (int d = 0; d < head_dim; d++) {
    Part key[N][PARTS];
    for (int n = 0; n < N; n++) {
      const T* from = keys[n] + d * stride;
      load_up_to<PARTIAL>(from, lanes, key[n]);
      if (!PARTIAL) prefetch(ahead[n] + d * LANES);
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++)
        for (int p = 0; p < PARTS; p++) sum[m][n][p] += query[m * head_dim + d] * key[n][p];
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store_parts(scores + m * CHUNK + n * LANES, sum[m][n]);
}

template <class T, int M>
void score_chunk(const float* query, int head_dim, const Column* columns, int count, const T* keys, const T* values,
                 int64_t stride, float* scores) {
  const T *key[WIDE], *ahead[WIDE];
  for (int done = 0; done < count;) {
    int full = 0;
    for (; full < WIDE && done + full < count && columns[done + full].lanes == LANES; full++) {
      key[full] = keys + columns[done + full].key;
      ahead[full] = values + columns[done + full].value;
    }
    float* to = scores + done * LANES;
    switch (full) {
      case 0:
        key[0] = keys + columns[done].key;
        score_columns<T, M, 1, true>(query, head_dim, key, stride, columns[done].lanes, ahead, to);
        full = 1;
        break;
      case 1: score_columns<T, M, 1, false>(query, head_dim, key, stride, LANES, ahead, to); break;
#if WIDE_COLUMNS >= 4
      case 2: score_columns<T, M, 2, false>(query, head_dim, key, stride, LANES, ahead, to); break;
      case 3: score_columns<T, M, 3, false>(query, head_dim, key, stride, LANES, ahead, to); break;
      default: score_columns<T, M, 4, false>(query, head_dim, key, stride, LANES, ahead, to);
#endif
    }
    done += full;
  }
}

// Adds a chunk's weighted values to `N` vectors of the outputs of `M` queries; `tail`: lanes of the last, 0: all.
template <class T, int M, int N, bool TAIL>
inline void weigh_columns(const float* weights, const float* decay, const Column* columns, int count, const T* values,
                          int value_dim, int tail, const T* const* ahead, int64_t ahead_step, float* output,
                          int output_stride) {
  Part sum[M][N][PARTS];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      load_parts(output + m * output_stride + n * LANES, sum[m][n]);
      for (int p = 0; p < PARTS; p++) sum[m][n][p] *= decay[m];
    }
  for (int c = 0; c < count; c++) {
    const T* from = values + columns[c].value;
    const T* next = ahead[c];
    for (int slot = 0; slot < columns[c].lanes; slot++, from += value_dim + SCALED<T>) {
      Part value[N][PARTS];
      for (int n = 0; n < N; n++) {
        if (TAIL && n == N - 1) load_up_to<true>(from + n * LANES, tail, value[n]);
        else load_parts(from + n * LANES, value[n]);
        if (next) prefetch(next + n * ahead_step);
      }
      if (next) next += N * ahead_step;
      for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
          for (int p = 0; p < PARTS; p++) sum[m][n][p] += weights[m * CHUNK + c * LANES + slot] * value[n][p];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store_parts(output + m * output_stride + n * LANES, sum[m][n]);
}

template <class T, int M>
void weigh_chunk(const float* weights, const float* decay, const Column* columns, int count, const T* values,
                 int value_dim, const T* const* ahead, int64_t ahead_step, float* output, int output_stride) {
  static const T* const nothing[CHUNK_COLUMNS] = {};
  int vectors = (value_dim + LANES - 1) / LANES, strips = (vectors + WIDE - 1) / WIDE;
  const T* shifted[CHUNK_COLUMNS];
  for (int strip = 0, first = 0; strip < strips; strip++) {
    int width = (vectors - first) / (strips - strip);
    int tail = strip == strips - 1 ? value_dim % LANES : 0;
    for (int c = 0; c < count; c++) shifted[c] = ahead[c] ? ahead[c] + first * LANES * ahead_step : nullptr;
    const T* from = values + first * LANES;
    float* to = output + first * LANES;
    const T* const* next = ahead == nothing ? nothing : shifted;
#define WEIGH(N)                                                                                                     \
  if (tail)                                                                                                          \
    weigh_columns<T, M, N, true>(weights, decay, columns, count, from, value_dim, tail, next, ahead_step, to,        \
                                 output_stride);                                                                     \
  else                                                                                                               \
    weigh_columns<T, M, N, false>(weights, decay, columns, count, from, value_dim, 0, next, ahead_step, to,          \
                                  output_stride)
    switch (width) {
      case 1: WEIGH(1); break;
#if WIDE_COLUMNS >= 4
      case 2: WEIGH(2); break;
      case 3: WEIGH(3); break;
      default: WEIGH(4);
#endif
    }
#undef WEIGH
    first += width;
  }
}

struct Operator {
  const KvPool& pool;
  const Spans& spans;
  const AttendCall& call;
  int group;         // query heads of one KV head
  int value_stride;  // of an output row in the workspace

  int scaled() const { return pool.dtype == KV_INT8 ? KV_SCALE_BYTES : 0; }
  int64_t head_stride_key() const { return (int64_t)(pool.head_dim + scaled()) * pool.block_tokens; }
  int64_t head_stride_value() const { return (int64_t)pool.block_tokens * (pool.value_dim + scaled()); }

  int position(const Tile& tile, int row) const {
    return spans.first_position[tile.span] + (tile.row + row - spans.first_row[tile.span]);
  }
  int first_key(const Tile& tile, int row) const {
    int first = spans.table_position[tile.span];
    return spans.window_tokens ? std::max(first, position(tile, row) - spans.window_tokens + 1) : first;
  }
  int end_key(const Tile& tile, int row) const {
    return std::min(position(tile, row) + 1, spans.key_end[tile.span]);
  }

  // Finds the slots that any row of the tile sees, from the start of a column on: a key has the same lane in any tile.
  void find_columns(const Tile& tile, std::vector<Column>& columns, std::vector<int32_t>& blocks) const {
    columns.clear();
    blocks.clear();
    const int end = end_key(tile, tile.rows - 1), tokens = pool.block_tokens;
    const int32_t* table = spans.blocks + spans.table_start[tile.span];
    const int first = first_key(tile, 0) - spans.table_position[tile.span];
    for (int key = spans.table_position[tile.span] + first - first % tokens % LANES; key < end;) {
      int from_table = key - spans.table_position[tile.span], offset = from_table % tokens;
      int lanes = std::min({LANES, tokens - offset, end - key});
      int64_t block = (int64_t)table[from_table / tokens] * pool.kv_heads;
      columns.push_back({block * head_stride_key() + offset,
                         block * head_stride_value() + (int64_t)offset * (pool.value_dim + scaled()), key, lanes});
      blocks.push_back(offset == 0 || columns.size() == 1 ? table[from_table / tokens] : -1);
      key += lanes;
    }
  }

  // Returns how many columns of the first chunk lie before the tile's first: chunks begin at the same keys in any tile.
  int missing_columns(const Tile& tile, const std::vector<Column>& columns, int step) const {
    const int tokens = pool.block_tokens, key = columns[0].position - spans.table_position[tile.span];
    return (key / tokens * ((tokens + LANES - 1) / LANES) + key % tokens / LANES) % step;
  }

  // Verifies a chunk, which is then in the cache for the computation.
  bool are_intact(const int32_t* blocks, int count, int kv_head, int which) const {
    for (int c = 0; c < count; c++)
      if (blocks[c] >= 0 && !is_intact(pool, *call.digests, blocks[c], kv_head, which)) {
        __atomic_store_n(&call.digests->bad, blocks[c], __ATOMIC_RELAXED);
        return false;
      }
    return true;
  }

  void load_queries(const Tile& tile, Workspace& work) const {
    const int dim = pool.head_dim, size = tile.heads * dim;
    for (int row = 0; row < tile.rows; row++) {
      const float* from = call.query + (tile.row + row) * call.query_stride + (int64_t)tile.head * dim;
      float* to = work.query + row * size;
      for (int i = 0; i < size; i++) to[i] = from[i] * call.scaling;
    }
    const int queries = tile.rows * tile.heads;
    std::fill_n(work.output, queries * value_stride, 0.0f);
    std::fill_n(work.highest, queries, NEGATIVE_INFINITY);
    std::fill_n(work.total, queries, 0.0f);
  }

  // Turns scores into weights relative to the highest score so far.
  void soften(const Tile& tile, const Column* columns, int count, int query, Workspace& work) const {
    float* scores = work.scores + query * CHUNK;
    const int row = query / tile.heads, first = first_key(tile, row), end = end_key(tile, row);
    Part highest[PARTS];
    for (int p = 0; p < PARTS; p++) highest[p] = Part{} + NEGATIVE_INFINITY;
    for (int c = 0; c < count; c++) {
      int from = first - columns[c].position, until = std::min(columns[c].lanes, end - columns[c].position);
      if (call.softcap != 0 || from > 0 || until < LANES) {
        Vec score = load(scores + c * LANES);
        if (call.softcap != 0) score = call.softcap * tanh(score * (1 / call.softcap));
        store(scores + c * LANES, within(score, from, until, NEGATIVE_INFINITY));
      }
      Part score[PARTS];
      load_parts(scores + c * LANES, score);
      for (int p = 0; p < PARTS; p++) highest[p] = highest[p] > score[p] ? highest[p] : score[p];
    }
    const float before = work.highest[query], now = std::max(before, largest(joined(highest)));
    // No key seen yet: any finite reference gives zero weights, and keeps NaN.
    const float reference = now == NEGATIVE_INFINITY ? 0.0f : now;
    Part total[PARTS] = {};
    for (int c = 0; c < count; c++) {
      Part weight[PARTS];
      load_parts(scores + c * LANES, weight);
      for (int p = 0; p < PARTS; p++) total[p] += weight[p] = exp_lanes<Part, WordPart>(weight[p] - reference);
      store_parts(scores + c * LANES, weight);
    }
    const float decay = now == before ? 1.0f : std::exp(before - now);
    work.highest[query] = now;
    work.decay[query] = decay;
    work.total[query] = work.total[query] * decay + added(joined(total));
  }

  // Multiplies what belongs to a chunk's slots by their scales, of keys or of values.
  void rescale(const Column* columns, int count, int queries, const int8_t* keys, const int8_t* values,
               Workspace& work) const {
    for (int c = 0; c < count; c++) {
      const int offset = columns[c].position % pool.block_tokens;
      float scale[LANES] = {};
      if (keys)
        std::memcpy(scale, keys + columns[c].key - offset + (int64_t)pool.head_dim * pool.block_tokens +
                        offset * KV_SCALE_BYTES, columns[c].lanes * sizeof(float));
      else
        for (int slot = 0; slot < columns[c].lanes; slot++)
          std::memcpy(scale + slot, values + columns[c].value + slot * (pool.value_dim + KV_SCALE_BYTES) +
                          pool.value_dim, sizeof(float));
      for (int query = 0; query < queries; query++) {
        float* to = work.scores + query * CHUNK + c * LANES;
        store(to, load(to) * load(scale));
      }
    }
  }

  void store_outputs(const Tile& tile, const Workspace& work) const {
    for (int query = 0; query < tile.rows * tile.heads; query++) {
      const int64_t row = tile.row + query / tile.heads, head = tile.head + query % tile.heads;
      const float total = work.total[query], factor = total == 0 ? 0 : 1 / total;
      const float* from = work.output + query * value_stride;
      float* to = call.output + (row * call.q_heads + head) * pool.value_dim;
      for (int i = 0; i < pool.value_dim; i++) to[i] = from[i] * factor;
      if (call.lse) {
        call.lse[row * call.q_heads + head] =
            total == 0 ? NEGATIVE_INFINITY : work.highest[query] + std::log(total);
      }
    }
  }

  // Returns false if a block does not match its digest.
  template <class T>
  bool attend_tile(const Tile& tile, Workspace& work) const {
    if (work.tile == nullptr || work.tile->row != tile.row) find_columns(tile, work.columns, work.blocks);
    work.tile = &tile;
    load_queries(tile, work);
    const int kv_head = tile.head / group, queries = tile.rows * tile.heads;
    const T* keys = static_cast<const T*>(pool.key) + kv_head * head_stride_key();
    const T* values = static_cast<const T*>(pool.value) + kv_head * head_stride_value();
    const int by_size = CHUNK_BYTES / (int)(pool.head_dim * LANES * sizeof(T));
    const int step = std::clamp(by_size, 2, CHUNK_COLUMNS), columns = (int)work.columns.size();
    int count = columns ? step - missing_columns(tile, work.columns, step) : 0;
    for (int done = 0; done < columns; done += count, count = step) {
      const Column* chunk = work.columns.data() + done;
      count = std::min(count, columns - done);
      const T* ahead[CHUNK_COLUMNS];
      for (int c = 0; c < count; c++) {
        const int next = done + count + c;
        // After the last chunk prefetch the next KV head of the same blocks.
        ahead[c] = next < columns ? keys + work.columns[next].key : keys + head_stride_key() + work.columns[c].key;
      }
      const int32_t* blocks = work.blocks.data() + done;
      if (tile.verifies && !are_intact(blocks, count, kv_head, 0)) return false;
      for (int query = 0; query < queries; query += ROWS) {
        const float* from = work.query + query * pool.head_dim;
        float* to = work.scores + query * CHUNK;
        with_rows(queries - query, [&](auto rows) {
          score_chunk<T, rows.value>(from, pool.head_dim, chunk, count, keys, values, pool.block_tokens, to);
        });
      }
      if constexpr (SCALED<T> > 0) rescale(chunk, count, queries, keys, nullptr, work);
      for (int query = 0; query < queries; query++) soften(tile, chunk, count, query, work);
      if constexpr (SCALED<T> > 0) rescale(chunk, count, queries, nullptr, values, work);
      if (tile.verifies && !are_intact(blocks, count, kv_head, 1)) return false;
      for (int query = 0; query < queries; query += ROWS) {
        float* to = work.output + query * value_stride;
        with_rows(queries - query, [&](auto rows) {
          weigh_chunk<T, rows.value>(work.scores + query * CHUNK, work.decay + query, chunk, count, values,
                                     pool.value_dim, ahead, pool.block_tokens, to, value_stride);
        });
        std::fill_n(ahead, count, nullptr);
      }
    }
    store_outputs(tile, work);
    return true;
  }

  template <int N>
  struct Rows {
    static constexpr int value = N;
  };
  template <class F>
  static void with_rows(int rows, F&& run) {
    switch (rows) {
      case 1: return run(Rows<1>{});
      case 2: return run(Rows<2>{});
      case 3: return run(Rows<3>{});
      default: return run(Rows<4>{});
    }
  }
};

bool well_formed(const KvPool& pool) {
  return pool.dtype >= KV_FP32 && pool.dtype <= KV_INT8 && pool.num_blocks > 0 && pool.before >= 0 &&
         pool.block_tokens > 0 &&
         pool.kv_heads > 0 && pool.head_dim > 0 && pool.value_dim > 0;
}

// Returns whether all blocks that a span's rows see exist.
bool blocks_exist(const KvPool& pool, const Spans& spans) {
  for (int s = 0; s < spans.count; s++) {
    const int rows = spans.first_row[s + 1] - spans.first_row[s];
    if (rows < 0 || spans.table_position[s] < 0 || spans.table_position[s] % pool.block_tokens) return false;
    const int end = std::min(spans.first_position[s] + rows, spans.key_end[s]) - spans.table_position[s];
    const int32_t* table = spans.blocks + spans.table_start[s];
    int first = spans.first_position[s] - spans.window_tokens + 1 - spans.table_position[s];
    first = spans.window_tokens ? std::max(0, first) : 0;
    for (int block = first / pool.block_tokens; block * pool.block_tokens < end; block++)
      if (table[block] < -pool.before || table[block] >= pool.num_blocks) return false;
  }
  return true;
}

}  // namespace

extern "C" int32_t kv_attend(const KvPool* pool, const Spans* spans, const AttendCall* call) {
  if (!well_formed(*pool)) return -1;
  if (call->q_heads <= 0 || call->q_heads % pool->kv_heads) return -2;
  if (!blocks_exist(*pool, *spans)) return -3;
  const int group = call->q_heads / pool->kv_heads;
  const int value_stride = (pool->value_dim + LANES - 1) / LANES * LANES;
  const Operator op{*pool, *spans, *call, group, value_stride};
  static thread_local std::vector<Tile> kept;
  std::vector<Tile>& tiles = kept;
  tiles.clear();
  const int heads = std::min(group, TILE), rows = std::max(1, TILE / group);
  for (int s = 0; s < spans->count; s++)
    for (int row = spans->first_row[s]; row < spans->first_row[s + 1]; row += rows) {
      const int in_tile = std::min(rows, spans->first_row[s + 1] - row);
      for (int kv_head = 0; kv_head < pool->kv_heads; kv_head++)
        for (int head = 0; head < group; head += heads)
          tiles.push_back({s, row, in_tile, kv_head * group + head, std::min(heads, group - head),
                           call->digests && head == 0 && (spans->window_tokens || row + in_tile == spans->first_row[s + 1])});
    }
  const int count = (int)tiles.size(), threads = std::max(1, call->threads);
  (void)threads;
  std::atomic<bool> intact{true};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Workspace work;
    work.reserve(pool->head_dim, value_stride);
    work.tile = nullptr;
#pragma omp for schedule(dynamic, 4)
    for (int i = 0; i < count; i++) {
      const bool found = pool->dtype == KV_FP32   ? op.attend_tile<float>(tiles[i], work)
                         : pool->dtype == KV_BF16 ? op.attend_tile<uint16_t>(tiles[i], work)
                                                  : op.attend_tile<int8_t>(tiles[i], work);
      if (!found) intact.store(false, std::memory_order_relaxed);
    }
  }
  return intact ? 0 : -4;
}

namespace {

// Rounds one head's numbers to a 127th of the largest, every `step` bytes; a number that is not finite makes all NaN.
void write_scaled(const float* from, int count, int8_t* to, int64_t step, int8_t* to_scale) {
  float largest = 0;
  bool finite = true;
  for (int i = 0; i < count; i++) {
    const float size = std::fabs(from[i]);
    finite &= size <= std::numeric_limits<float>::max();
    largest = size > largest ? size : largest;
  }
  const float scale = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < count; i++) to[i * step] = scale > 0 ? (int8_t)std::lrint(from[i] / scale) : 0;
  std::memcpy(to_scale, &scale, sizeof scale);
}

template <class T>
void write_rows(const KvPool& pool, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                const int64_t* slots, int rows) {
  const int tokens = pool.block_tokens;
  for (int row = 0; row < rows; row++) {
    if (slots[row] < 0) continue;
    const int64_t block = slots[row] / tokens, offset = slots[row] % tokens;
    for (int head = 0; head < pool.kv_heads; head++) {
      const int64_t at = block * pool.kv_heads + head;
      T* block_key = static_cast<T*>(pool.key) + at * (pool.head_dim + SCALED<T>) * tokens;
      T* to_key = block_key + offset;
      T* to_value = static_cast<T*>(pool.value) + (at * tokens + offset) * (pool.value_dim + SCALED<T>);
      const float* from_key = key + row * key_stride + (int64_t)head * pool.head_dim;
      const float* from_value = value + row * value_stride + (int64_t)head * pool.value_dim;
      if constexpr (SCALED<T> > 0) {
        int8_t* scale = block_key + (int64_t)pool.head_dim * tokens + offset * KV_SCALE_BYTES;
        write_scaled(from_key, pool.head_dim, to_key, tokens, scale);
        write_scaled(from_value, pool.value_dim, to_value, 1, to_value + pool.value_dim);
      } else {
        for (int d = 0; d < pool.head_dim; d++) put(to_key + (int64_t)d * tokens, from_key[d]);
        for (int d = 0; d < pool.value_dim; d++) put(to_value + d, from_value[d]);
      }
    }
  }
}

}  // namespace

extern "C" int32_t kv_write(const KvPool* pool, const float* key, int64_t key_stride, const float* value,
                            int64_t value_stride, const int64_t* slots, int32_t rows) {
  if (!well_formed(*pool)) return -1;
  for (int row = 0; row < rows; row++)
    if (slots[row] < -1 || slots[row] >= (int64_t)pool->num_blocks * pool->block_tokens) return -3;
  if (pool->dtype == KV_FP32)
    write_rows<float>(*pool, key, key_stride, value, value_stride, slots, rows);
  else if (pool->dtype == KV_INT8)
    write_rows<int8_t>(*pool, key, key_stride, value, value_stride, slots, rows);
  else
    write_rows<uint16_t>(*pool, key, key_stride, value, value_stride, slots, rows);
  return 0;
}
