// See exchange.h.
#include "exchange.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

#include "digest.h"

namespace {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

enum Kind : uint32_t { STEP = 0x5358564b, QUESTION = 0x5158564b, ANSWER = 0x4158564b, END = 0x4558564b };
constexpr int32_t OF_STEP = 0, OF_EXCHANGE = -1;  // layers of an END
constexpr int64_t MOST_ROWS = 1 << 16, MOST_BLOCKS = 1 << 22, MOST_BYTES = 1 << 30;
constexpr int ALIGNED = 64;

struct Header {
  uint32_t kind;
  int32_t layer;   // in a step: number of spans
  float scaling;   // in an answer: seconds of computing
  float softcap;
  int32_t status;  // in an answer: 0 or an error; in a step: number of rows
  int32_t blocks;  // in a step
  uint64_t digest;
};

Deadline after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// A header followed by its aligned payload; kept between calls.
struct Frame {
  std::vector<char> memory;
  char* start = nullptr;
  int64_t bytes = 0;

  void reserve(int64_t payload) {
    bytes = (int64_t)sizeof(Header) + payload;
    if ((int64_t)memory.size() < bytes + 2 * ALIGNED) memory.resize(bytes + 2 * ALIGNED);
    const auto at = reinterpret_cast<uintptr_t>(memory.data()) + sizeof(Header);
    start = memory.data() + ((at + ALIGNED - 1) / ALIGNED * ALIGNED - at);
  }
  Header* header() { return reinterpret_cast<Header*>(start); }
  float* payload() { return reinterpret_cast<float*>(start + sizeof(Header)); }

  uint64_t digest() {
    Header kept = *header();
    header()->digest = 0;
    const uint64_t found = kvasir::portable_digest(start, bytes);
    *header() = kept;
    return found;
  }
  void seal() { header()->digest = digest(); }
  bool is_intact(Kind kind) { return header()->kind == kind && header()->digest == digest(); }
};

int32_t wait_for(int fd, short what, Deadline until) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now()).count();
    if (left <= 0) return EXCHANGE_LATE;
    pollfd one{fd, what, 0};
    const timespec timeout{left / 1000000, left % 1000000 * 1000};
    const int ready = ppoll(&one, 1, &timeout, nullptr);
    if (ready > 0) return 0;
    if (ready < 0 && errno != EINTR) return EXCHANGE_LOST;
  }
}

int32_t send_all(int fd, const char* from, int64_t bytes, Deadline until) {
  while (bytes) {
    const ssize_t sent = send(fd, from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      from += sent;
      bytes -= sent;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (int32_t failed = wait_for(fd, POLLOUT, until)) return failed;
    } else if (errno != EINTR) {
      return EXCHANGE_LOST;
    }
  }
  return 0;
}

int32_t receive_all(int fd, char* into, int64_t bytes, Deadline until) {
  while (bytes) {
    const ssize_t got = recv(fd, into, bytes, MSG_DONTWAIT);
    if (got > 0) {
      into += got;
      bytes -= got;
    } else if (got == 0) {
      return EXCHANGE_LOST;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (int32_t failed = wait_for(fd, POLLIN, until)) return failed;
    } else if (errno != EINTR) {
      return EXCHANGE_LOST;
    }
  }
  return 0;
}

bool has_hung_up(int fd) {
  pollfd one{fd, POLLRDHUP, 0};
  return poll(&one, 1, 0) != 0;
}

// Reads the bytes read ahead, then the socket.
int32_t receive(Serving& serving, char* into, int64_t bytes, Deadline until) {
  const int64_t had = std::min(bytes, serving.ahead_bytes - serving.ahead_used);
  std::memcpy(into, serving.ahead + serving.ahead_used, had);
  serving.ahead_used += had;
  return receive_all(serving.fd, into + had, bytes - had, until);
}

// A step's part with checked indices.
struct Part {
  std::vector<int32_t> table_position;
  std::vector<int64_t> kept_slots;
  Spans spans{};
  int32_t rows = 0;

  // Parses a step's `payload`, which must outlive this. Returns whether it is consistent.
  bool read(const Header& header, const char* payload, int block_tokens) {
    const int32_t count = header.layer, blocks = header.blocks;
    rows = header.status;
    const int32_t* first_row = reinterpret_cast<const int32_t*>(payload);
    spans.count = count;
    spans.first_row = first_row;
    spans.first_position = first_row + count + 1;
    spans.table_start = spans.first_position + count;
    spans.key_end = spans.table_start + count;
    spans.blocks = spans.key_end + count;
    table_position.assign(count, 0);
    spans.table_position = table_position.data();
    if (first_row[0] != 0 || first_row[count] != rows) return false;
    for (int32_t s = 0; s < count; s++) {
      if (first_row[s + 1] < first_row[s] || spans.first_position[s] < 0 || spans.table_start[s] < 0) return false;
      if (spans.first_position[s] > INT32_MAX - rows || spans.key_end[s] < 0) return false;
      const int64_t needed = ((int64_t)spans.key_end[s] + block_tokens - 1) / block_tokens;
      if (spans.table_start[s] + needed > blocks) return false;
    }
    kept_slots.clear();
    const char* slots = reinterpret_cast<const char*>(spans.blocks + blocks);
    for (int32_t row = 0; row < rows; row++) {
      int64_t slot;
      std::memcpy(&slot, slots + row * sizeof slot, sizeof slot);
      if (slot < -1) return false;
      if (slot >= 0) kept_slots.push_back(slot);
    }
    return true;
  }

  // Returns whether all blocks that it reads or writes are lent.
  bool is_lent(const uint8_t* lent, int32_t blocks, int32_t num_blocks, int block_tokens) const {
    for (int32_t i = 0; i < blocks; i++)
      if (spans.blocks[i] < 0 || spans.blocks[i] >= num_blocks || !lent[spans.blocks[i]]) return false;
    for (int64_t slot : kept_slots)
      if (slot / block_tokens >= num_blocks || !lent[slot / block_tokens]) return false;
    return true;
  }
};

int64_t step_bytes(int64_t spans, int64_t rows, int64_t blocks) {
  return (4 * spans + 1 + blocks) * sizeof(int32_t) + rows * sizeof(int64_t);
}

struct Creditor {
  Serving& serving;
  Part part;
  Frame step, question, answer;

  // Writes, then attends. One at a time per process, because a share of one core is lent.
  int32_t compute(int layer, const Header& asked, const float* payload, float* output) {
    static std::mutex computing;
    const std::lock_guard<std::mutex> alone(computing);
    const KvPool& pool = serving.pools[layer];
    const int64_t head = (int64_t)pool.kv_heads * pool.head_dim, value = (int64_t)pool.kv_heads * pool.value_dim;
    const int32_t kept = (int32_t)part.kept_slots.size();
    const float* keys = payload + (int64_t)part.rows * serving.q_heads * pool.head_dim;
    if (kept) {
      const int32_t failed = kv_write_sealed(&pool, keys, head, keys + kept * head, value, part.kept_slots.data(), kept,
                                             &serving.digests[layer]);
      if (failed) return failed;
    }
    AttendCall call{};
    call.query = payload;
    call.query_stride = (int64_t)serving.q_heads * pool.head_dim;
    call.q_heads = serving.q_heads;
    call.scaling = asked.scaling;
    call.softcap = asked.softcap;
    call.output = output;
    call.lse = output + (int64_t)part.rows * serving.q_heads * pool.value_dim;
    call.threads = serving.threads;
    call.digests = &serving.digests[layer];
    return kv_attend(&pool, &part.spans, &call);
  }

  int32_t send_answer(int layer, double took_s, int32_t status) {
    *answer.header() = Header{ANSWER, layer, (float)took_s, 0, status, 0, 0};
    answer.seal();
    return send_all(serving.fd, answer.start, answer.bytes, after(serving.patience_s));
  }

  // Reads the rest of a frame whose header is complete.
  int32_t receive_payload(Frame& frame, int64_t payload, Deadline until) {
    const Header kept = *frame.header();
    frame.reserve(payload);
    *frame.header() = kept;
    return receive(serving, (char*)frame.payload(), payload, until);
  }

  // Serves one layer. Returns 0, or why the step ends.
  int32_t serve_layer(int layer, int32_t refusal) {
    const KvPool& pool = serving.pools[layer];
    const int64_t asked = (int64_t)part.rows * serving.q_heads * pool.head_dim +
                          (int64_t)part.kept_slots.size() * pool.kv_heads * (pool.head_dim + pool.value_dim);
    const int64_t found = (int64_t)part.rows * serving.q_heads * (pool.value_dim + 1);
    if (std::max(asked, found) * (int64_t)sizeof(float) > MOST_BYTES) return EXCHANGE_MANGLED;
    const Deadline until = after(serving.patience_s);
    question.reserve(0);
    if (int32_t failed = receive(serving, question.start, sizeof(Header), until)) return failed;
    if (question.header()->kind == END)
      return question.is_intact(END) && question.header()->layer == OF_STEP ? EXCHANGE_STOPPED : EXCHANGE_MANGLED;
    if (int32_t failed = receive_payload(question, asked * sizeof(float), until)) return failed;
    const Header& header = *question.header();
    if (!question.is_intact(QUESTION) || header.layer != layer) return EXCHANGE_MANGLED;
    // A debtor that gave up has closed the connection, so nothing of it may be written.
    if (has_hung_up(serving.fd)) return EXCHANGE_LOST;
    answer.reserve(refusal ? 0 : found * sizeof(float));
    if (refusal) {
      const int32_t unsent = send_answer(layer, 0, refusal);
      return unsent ? unsent : refusal;
    }
    const Deadline began = Clock::now();
    const int32_t failed = compute(layer, header, question.payload(), answer.payload());
    const double took_s = std::chrono::duration<double>(Clock::now() - began).count();
    serving.compute_s += took_s;
    if (failed) answer.reserve(0);
    const int32_t unsent = send_answer(layer, took_s, failed);
    return failed ? failed : unsent;
  }

  // Serves a step whose header is complete. Returns 0 if another step may follow.
  int32_t serve_step() {
    const Header header = *step.header();
    const KvPool& pool = serving.pools[0];
    const bool is_sound = header.kind == STEP && header.layer > 0 && header.status > 0 && header.status <= MOST_ROWS &&
                          header.layer <= header.status && header.blocks >= 0 && header.blocks <= MOST_BLOCKS;
    if (!is_sound) return EXCHANGE_MANGLED;
    const int64_t payload = step_bytes(header.layer, header.status, header.blocks);
    if (int32_t failed = receive_payload(step, payload, after(serving.patience_s))) return failed;
    if (!step.is_intact(STEP) || !part.read(header, (const char*)step.payload(), pool.block_tokens))
      return EXCHANGE_MANGLED;
    const bool lent = part.is_lent(serving.lent, header.blocks, pool.num_blocks, pool.block_tokens);
    const int32_t refusal = !lent ? EXCHANGE_STALE : serving.is_full ? EXCHANGE_FULL : 0;
    for (int layer = 0; layer < serving.layers; layer++) {
      serving.layer = layer;
      const int32_t ended = serve_layer(layer, refusal);
      if (ended == EXCHANGE_FULL || ended == EXCHANGE_STOPPED) return 0;  // another step may follow
      if (ended) return ended;
    }
    return 0;
  }

  int32_t serve() {
    const Deadline turn = after(serving.turn_s);
    do {
      if (serving.ahead_used == serving.ahead_bytes) {
        const int32_t waited = wait_for(serving.fd, POLLIN, after(serving.idle_s));
        if (waited) return waited == EXCHANGE_LATE ? EXCHANGE_PAUSED : waited;
      }
      step.reserve(0);
      if (int32_t failed = receive(serving, step.start, sizeof(Header), after(serving.patience_s))) return failed;
      if (step.header()->kind == END) {
        if (!step.is_intact(END)) return EXCHANGE_MANGLED;
        if (step.header()->layer == OF_EXCHANGE) return EXCHANGE_STOPPED;
        continue;  // for a step that has already ended: it crossed with the last answer
      }
      if (int32_t failed = serve_step()) return failed;
    } while (Clock::now() < turn);
    return EXCHANGE_PAUSED;
  }
};

float* gather(float* to, const float* from, int64_t stride, const int64_t* rows, int32_t count, int64_t width) {
  for (int32_t i = 0; i < count; i++, to += width) std::memcpy(to, from + rows[i] * stride, width * sizeof(float));
  return to;
}

}  // namespace

extern "C" int32_t kv_serve(Serving* serving) {
  // Frames are kept between calls, because each thread serves one link.
  static thread_local Frame step, question, answer;
  Creditor creditor{*serving, {}, std::move(step), std::move(question), std::move(answer)};
  serving->ahead_used = 0;
  serving->compute_s = 0;
  const int32_t ended = creditor.serve();
  step = std::move(creditor.step);
  question = std::move(creditor.question);
  answer = std::move(creditor.answer);
  return ended;
}

static thread_local Frame asked, taken;

extern "C" int32_t kv_ask(Asking* asking) {
  const int64_t query = (int64_t)asking->q_heads * asking->head_dim, key = (int64_t)asking->kv_heads * asking->head_dim;
  const int64_t value = (int64_t)asking->kv_heads * asking->value_dim;
  asked.reserve((asking->rows * query + asking->kept * (key + value)) * sizeof(float));
  float* to = gather(asked.payload(), asking->query, asking->query_stride, asking->row, asking->rows, query);
  to = gather(to, asking->key, asking->key_stride, asking->kept_row, asking->kept, key);
  gather(to, asking->value, asking->value_stride, asking->kept_row, asking->kept, value);
  *asked.header() = Header{QUESTION, asking->layer, asking->scaling, asking->softcap, 0, 0, 0};
  asked.seal();
  return send_all(asking->fd, asked.start, asked.bytes, after(asking->deadline_s));
}

extern "C" int32_t kv_take(Asking* asking) {
  const Deadline until = after(asking->deadline_s);
  const int64_t lse = (int64_t)asking->rows * asking->q_heads, output = lse * asking->value_dim;
  taken.reserve((output + lse) * sizeof(float));
  if (int32_t failed = receive_all(asking->fd, taken.start, sizeof(Header), until)) return failed;
  const Header& header = *taken.header();
  if (header.kind == ANSWER && header.status) {
    taken.bytes = sizeof(Header);
    return taken.is_intact(ANSWER) && header.layer == asking->layer ? header.status : EXCHANGE_MANGLED;
  }
  if (int32_t failed = receive_all(asking->fd, (char*)taken.payload(), (output + lse) * sizeof(float), until))
    return failed;
  if (!taken.is_intact(ANSWER) || header.layer != asking->layer) return EXCHANGE_MANGLED;
  std::memcpy(asking->output, taken.payload(), output * sizeof(float));
  std::memcpy(asking->lse, taken.payload() + output, lse * sizeof(float));
  asking->compute_s = header.scaling;
  return 0;
}

extern "C" int32_t kv_step(Asking* asking) {
  const Spans& spans = *asking->spans;
  const int64_t count = spans.count;
  asked.reserve(step_bytes(count, asking->rows, asking->blocks));
  char* to = (char*)asked.payload();
  auto put = [&](const void* from, int64_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  };
  put(spans.first_row, (count + 1) * sizeof(int32_t));
  for (const int32_t* array : {spans.first_position, spans.table_start, spans.key_end}) put(array, count * sizeof(int32_t));
  put(spans.blocks, asking->blocks * sizeof(int32_t));
  put(asking->slots, asking->rows * sizeof(int64_t));
  *asked.header() = Header{STEP, (int32_t)count, 0, 0, asking->rows, asking->blocks, 0};
  asked.seal();
  return send_all(asking->fd, asked.start, asked.bytes, after(asking->deadline_s));
}

static int32_t send_end(Asking* asking, int32_t of) {
  asked.reserve(0);
  *asked.header() = Header{END, of, 0, 0, 0, 0, 0};
  asked.seal();
  return send_all(asking->fd, asked.start, asked.bytes, after(asking->deadline_s));
}

extern "C" int32_t kv_give_up(Asking* asking) { return send_end(asking, OF_STEP); }
extern "C" int32_t kv_stop(Asking* asking) { return send_end(asking, OF_EXCHANGE); }
