// See merge.h.
#include "merge.h"

#include <cmath>
#include <limits>

extern "C" void kv_merge(float* output, float* lse, const float* part, const float* part_lse, const int64_t* rows,
                         int32_t count, int32_t heads, int32_t value_dim) {
  for (int64_t row = 0; row < count; row++)
    for (int64_t head = 0; head < heads; head++) {
      const int64_t from = row * heads + head, to = rows[row] * heads + head;
      const float held = lse[to], added = part_lse[from];
      const float highest = held > added ? held : added;  // NaN if `added` is NaN
      if (highest == -std::numeric_limits<float>::infinity()) continue;
      const float keep = std::exp(held - highest), take = std::exp(added - highest), total = keep + take;
      const float keep_share = keep / total, take_share = take / total;
      float* out = output + to * value_dim;
      const float* in = part + from * value_dim;
      for (int32_t i = 0; i < value_dim; i++) out[i] = keep_share * out[i] + take_share * in[i];
      lse[to] = highest + std::log(total);
    }
}
