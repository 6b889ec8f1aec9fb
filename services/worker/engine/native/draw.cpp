// See draw.h.
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector.h"

namespace {

using namespace panels;

constexpr int kDigits = 3;
constexpr int kShift[kDigits] = {20, 10, 0};
constexpr int kBits[kDigits] = {12, 10, 10};
constexpr int kBuckets = 1 << 12;
constexpr int kBlock = 64;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float value_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Sets weights = e^((logits - highest) / temperature), 0 below `floor`. Returns their sum.
double weigh(const float* logits, float highest, const Draw& draw, int32_t vocabulary, float* weights) {
  const float scale = 1.0f / std::max(draw.temperature, 1e-5f), floor = std::max(draw.min_p, 2e-38f);
  double total = 0;
  for (int32_t first = 0; first < vocabulary; first += kLanes) {
    const int32_t lanes = std::min(kLanes, vocabulary - first);
    Vec weight = broadcast(-INFINITY);
    std::memcpy(&weight, logits + first, sizeof(float) * lanes);
    weight = exponential((weight - highest) * scale);
    weight = weight >= floor ? weight : Vec{};
    std::memcpy(weights + first, &weight, sizeof(float) * lanes);
    total += sum(weight);
  }
  return total;
}

// Rank and mass of an ordered row above a value.
struct Above {
  int64_t count = 0;
  double mass = 0;
};

// Returns the weight of the token at which the likeliest tokens reach `count` or `mass`; 0 if they never do.
// Sets `above` to the rank and mass strictly above that weight.
float threshold(const float* weights, int32_t vocabulary, int64_t count, double mass, Above* above) {
  static thread_local int32_t counts[kBuckets];
  static thread_local double masses[kBuckets];
  uint32_t prefix = 0;
  *above = {};
  for (int digit = 0; digit < kDigits; ++digit) {
    const int shift = kShift[digit], buckets = 1 << kBits[digit];
    std::fill_n(counts, buckets, 0);
    std::fill_n(masses, buckets, 0.0);
    for (int32_t token = 0; token < vocabulary; ++token) {
      const uint32_t bits = bits_of(weights[token]);
      if (digit && bits >> kShift[digit - 1] != prefix) continue;
      const uint32_t bucket = bits >> shift & (buckets - 1);
      ++counts[bucket];
      masses[bucket] += weights[token];
    }
    int bucket = buckets - 1;
    for (; bucket > 0; --bucket) {
      if (above->count + counts[bucket] >= count || (counts[bucket] && above->mass + masses[bucket] >= mass)) break;
      above->count += counts[bucket];
      above->mass += masses[bucket];
    }
    prefix = prefix << kBits[digit] | static_cast<uint32_t>(bucket);
  }
  return value_of(prefix);
}

// Returns the smallest weight that top-k and top-p keep.
float least_kept(const float* weights, int32_t vocabulary, double total, const Draw& draw) {
  Above above;
  float least = 0;
  if (draw.top_k > 0 && draw.top_k < vocabulary) {
    least = threshold(weights, vocabulary, draw.top_k, INFINITY, &above);
    total = above.mass + static_cast<double>(draw.top_k - above.count) * least;
  }
  if (draw.top_p < 1)
    least = std::max(least, threshold(weights, vocabulary, INT64_MAX, draw.top_p * total, &above));
  return least;
}

typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));

// lowbias32, of one number or of a vector of them.
template <typename Number>
Number scatter(Number value) {
  value = (value ^ (value >> 16)) * 0x7FEB352Du;
  value = (value ^ (value >> 15)) * 0x846CA68Bu;
  return value ^ (value >> 16);
}

// Arrival times of tokens (see drawing.py).
class Race {
 public:
  explicit Race(uint64_t key) : low_(static_cast<uint32_t>(key)), high_(static_cast<uint32_t>(key >> 32)) {}

  // Returns the arrival time at rate 1.
  double time(uint32_t token) const {
    const uint32_t mixed = scatter(token * kStep + low_);
    const double above = scatter(mixed ^ high_), below = scatter(mixed + kSecond);
    const double early = (above + (below + 0.5) * 0x1p-32) * 0x1p-32;
    return -std::log1p(-std::min(early, 1 - 0x1p-53));
  }

  // Returns lower bounds of the times of the tokens from `first` on.
  Vec least_times(uint32_t first) const {
    UintVec tokens;
    for (int lane = 0; lane < kLanes; ++lane) tokens[lane] = first + lane;
    const UintVec above = scatter(scatter(tokens * kStep + low_) ^ high_);
    return __builtin_convertvector(reinterpret_cast<IntVec>(above >> 8), Vec) * 0x1p-24f;
  }

 private:
  static constexpr uint32_t kStep = 0x9E3779B1u, kSecond = 0x85EBCA6Bu;
  uint32_t low_, high_;
};

// Returns the first token to arrive among those with a weight of at least `least`. Exact times are computed only for
// the few candidates that the lower bounds leave.
int64_t winner(const float* weights, int32_t vocabulary, float least, uint64_t key) {
  const Race race(key);
  constexpr float kSlack = 1 + 1e-6f;  // larger than the rounding between the two times
  double best = INFINITY;
  int64_t token = 0;
  for (int32_t first = 0; first < vocabulary; first += kLanes) {
    const int32_t lanes = std::min(kLanes, vocabulary - first);
    Vec weight = {};
    std::memcpy(&weight, weights + first, sizeof(float) * lanes);
    const IntVec may = (race.least_times(first) < weight * (static_cast<float>(best) * kSlack)) & (weight >= least);
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= may[lane];
    if (!any) continue;
    for (int lane = 0; lane < lanes; ++lane) {
      if (!may[lane]) continue;
      const double time = race.time(first + lane) / weight[lane];
      if (time < best) {
        best = time;
        token = first + lane;
      }
    }
  }
  return token;
}

// First likeliest token in the scanned part of a row.
struct Likeliest {
  int64_t token = 0;
  float logit = -INFINITY;
  bool is_odd = false;  // some logit is NaN

  void consider(const float* row, int32_t token_id) {
    is_odd |= std::isnan(row[token_id]);
    if (row[token_id] > logit) {
      logit = row[token_id];
      token = token_id;
    }
  }
};

constexpr int kBits32 = 32;

// Scans 32 tokens; a few vector operations skip them if none is above the current maximum.
void consider_all(const float* row, int32_t first, Likeliest* found) {
  Vec above = {};
  for (int32_t at = first; at < first + kBits32; at += kLanes) {
    const Vec logits = load(row + at);
    above = logits <= found->logit ? above : broadcast(1.0f);  // NaN is above
  }
  if (sum(above) == 0) return;
  for (int32_t token = first; token < first + kBits32; ++token) found->consider(row, token);
}

}  // namespace

extern "C" {

void draw_tokens(const float* logits, const float* highest, int32_t vocabulary, float* scratch, Draw* draws,
                 int32_t count) {
  for (Draw* draw = draws; draw < draws + count; ++draw) {
    const float* row = logits + draw->row * vocabulary;
    const double total = weigh(row, highest[draw->row], *draw, vocabulary, scratch);
    const float least = least_kept(scratch, vocabulary, total, *draw);
    draw->token = winner(scratch, vocabulary, least, draw->key);
  }
}

void find_likeliest(const float* logits, int32_t vocabulary, const int64_t* rows, const uint32_t* masks, int32_t count,
                    int32_t words, int64_t* tokens, float* highest) {
  for (int32_t at = 0; at < count; ++at) {
    const float* row = logits + rows[at] * vocabulary;
    const uint32_t* mask = masks == nullptr ? nullptr : masks + static_cast<int64_t>(at) * words;
    Likeliest found;
    for (int32_t word = 0, first = 0; first < vocabulary; ++word, first += kBits32) {
      uint32_t bits = mask == nullptr ? UINT32_MAX : word < words ? mask[word] : 0;
      if (bits == UINT32_MAX && first + kBits32 <= vocabulary) {
        consider_all(row, first, &found);
        continue;
      }
      for (; bits; bits &= bits - 1) {
        const int32_t token = first + __builtin_ctz(bits);
        if (token < vocabulary) found.consider(row, token);
      }
    }
    tokens[at] = found.token;
    highest[at] = found.is_odd ? NAN : found.logit;
  }
}

void mask_logits(float* logits, int32_t vocabulary, const int64_t* rows, const uint32_t* masks, int32_t count,
                 int32_t words) {
  for (int32_t at = 0; at < count; ++at) {
    float* row = logits + rows[at] * vocabulary;
    const uint32_t* mask = masks + static_cast<int64_t>(at) * words;
    for (int32_t word = 0, first = 0; first < vocabulary; ++word, first += 32) {
      const uint32_t bits = word < words ? mask[word] : 0;
      if (bits == UINT32_MAX) continue;
      const int32_t last = std::min(first + 32, vocabulary);
      for (int32_t token = first; token < last; ++token)
        if (!(bits >> (token - first) & 1)) row[token] = -INFINITY;
    }
  }
}
}
