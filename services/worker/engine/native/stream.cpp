// See stream.h.
#include "stream.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

double since(Clock::time_point began) { return Seconds(Clock::now() - began).count(); }

// One direction of a link with a bandwidth limit: a copy ends when the link would have carried it.
struct Pace {
  double bytes_s = 0;
  Clock::time_point due = Clock::now();

  void sent(int64_t bytes) {
    if (bytes_s <= 0) return;
    due = std::max(due, Clock::now()) + std::chrono::duration_cast<Clock::duration>(Seconds(bytes / bytes_s));
  }
};

}  // namespace

struct KvStream {
  StreamMemory memory;
  std::mutex lock;
  std::condition_variable changed;
  Pace in, out;
  const StreamStep* step = nullptr;
  int32_t first = 0;        // buffer of layer 0 in this step
  int32_t ahead = 0;        // number of layers fetched before the step began
  int32_t fetched = 0;      // number of layers whose blocks are fetched
  int32_t left = 0;         // number of layers that have attended
  int32_t saved = 0;        // number of the step's saves that are done
  bool is_working = false, is_saving = false;
  bool is_over = false;     // the step has ended: stop its copies
  bool is_halting = false;  // stop all copies
  bool is_closing = false;
  StreamFigures figures{};
  std::thread thread;

  uint8_t* row(int32_t index, int32_t layer) const {
    return memory.host + (index * static_cast<int64_t>(memory.layers) + layer) * block_bytes();
  }
  uint8_t* key(int64_t index) const { return memory.key + index * memory.key_bytes; }
  uint8_t* value(int64_t index) const { return memory.value + index * memory.value_bytes; }
  int64_t index_of(int32_t block, int32_t layer) const {
    return static_cast<int64_t>(layer) * memory.device_blocks + block;
  }
  int64_t block_bytes() const { return memory.key_bytes + memory.value_bytes; }
  const int32_t* buffer(const StreamStep& of, int32_t layer) const { return of.buffer[(first + layer) % 2]; }

  void bring(int32_t from, int32_t layer, int64_t to) const {
    const uint8_t* source = row(from, layer);
    std::memcpy(key(to), source, memory.key_bytes);
    std::memcpy(value(to), source + memory.key_bytes, memory.value_bytes);
  }
  void take(int32_t from, int32_t to) const {
    for (int32_t layer = 0; layer < memory.layers; ++layer) {
      const int64_t at = index_of(from, layer);
      std::memcpy(row(to, layer), key(at), memory.key_bytes);
      std::memcpy(row(to, layer) + memory.key_bytes, value(at), memory.value_bytes);
    }
  }

  // Waits until the link has carried all sent bytes, or until idle.
  void wait_for(std::unique_lock<std::mutex>& held, const Pace& pace, const bool& is_idle) {
    while (pace.bytes_s > 0 && !is_idle && Clock::now() < pace.due) changed.wait_until(held, pace.due);
  }

  // Copies one layer of a step's blocks from `begin` on to their places (unless `is_next`) or to the buffer of `layer`.
  void bring_layer(std::unique_lock<std::mutex>& held, const StreamStep& of, int32_t begin, int32_t layer,
                   bool is_next, const bool& is_idle) {
    const int32_t* to = buffer(of, layer);
    const int32_t source = is_next ? layer - memory.layers : layer;
    held.unlock();
    const auto began = Clock::now();
    int64_t blocks = 0;
    for (int32_t which = begin; which < of.count; ++which) {
      const bool is_placed = of.place[which] >= 0;
      if (is_placed && is_next) continue;
      bring(of.from[which], source, is_placed ? index_of(of.place[which], source) : to[which]);
      ++blocks;
    }
    held.lock();
    in.sent(blocks * block_bytes());
    figures.fetched += blocks;
    wait_for(held, in, is_idle);
    figures.fetch_s += since(began);
  }

  void fetch(std::unique_lock<std::mutex>& held, const StreamStep& of) {
    for (int32_t layer = 0; layer < memory.layers; ++layer) {
      changed.wait(held, [&] { return is_over || left >= layer - 1; });
      if (is_over) return;
      bring_layer(held, of, layer < ahead ? of.kept : 0, layer, false, is_over);
      ++figures.layers;
      figures.early += left < layer;
      fetched = layer + 1;
      changed.notify_all();
    }
  }

  void save(std::unique_lock<std::mutex>& held, const StreamStep& of) {
    is_saving = true;
    while (saved < of.saves && !is_over && !is_halting && left < memory.layers - 1) {
      const int32_t from = of.save_from[saved], to = of.save_to[saved];
      held.unlock();
      const auto began = Clock::now();
      take(from, to);
      held.lock();
      ++saved;
      ++figures.saved;
      out.sent(memory.layers * block_bytes());
      wait_for(held, out, is_over);
      figures.save_s += since(began);
    }
    is_saving = false;
    changed.notify_all();
  }

  // Fetches two layers for the next step, which most likely reads the same blocks.
  int32_t bring_ahead(std::unique_lock<std::mutex>& held, const StreamStep& of) {
    for (int32_t layer = 0; layer < 2; ++layer) {
      changed.wait(held, [&] { return is_halting || left >= memory.layers - 1 + layer; });
      if (is_halting) return layer;
      bring_layer(held, of, 0, memory.layers + layer, true, is_halting);
    }
    return 2;
  }

  void work() {
    std::unique_lock<std::mutex> held(lock);
    for (;;) {
      changed.wait(held, [&] { return is_closing || is_working; });
      if (is_closing) return;
      if (step->count) fetch(held, *step);
      save(held, *step);
      ahead = step->count ? bring_ahead(held, *step) : 0;
      first = (first + memory.layers) % 2;
      is_working = false;
      changed.notify_all();
    }
  }

  void halt(std::unique_lock<std::mutex>& held) {
    is_halting = is_over = true;
    changed.notify_all();
    changed.wait(held, [&] { return !is_working; });
  }
};

extern "C" {

KvStream* stream_open(const StreamMemory* memory) {
  auto* stream = new KvStream;
  stream->memory = *memory;
  stream->thread = std::thread([stream] { stream->work(); });
  return stream;
}

void stream_close(KvStream* stream) {
  {
    std::unique_lock<std::mutex> held(stream->lock);
    stream->halt(held);
    stream->is_closing = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
}

void stream_pace(KvStream* stream, double in_bytes_s, double out_bytes_s) {
  std::lock_guard<std::mutex> held(stream->lock);
  stream->in.bytes_s = in_bytes_s;
  stream->out.bytes_s = out_bytes_s;
}

void stream_begin(KvStream* stream, const StreamStep* step) {
  std::unique_lock<std::mutex> held(stream->lock);
  stream->halt(held);
  stream->step = step;
  stream->fetched = stream->left = stream->saved = 0;
  stream->is_over = stream->is_halting = false;
  stream->is_working = step->count || step->saves;
  stream->changed.notify_all();
}

int32_t stream_enter(KvStream* stream, int32_t layer, double timeout_s) {
  const StreamStep& step = *stream->step;
  if (!step.count) return 0;
  const int32_t* buffer;
  {
    std::unique_lock<std::mutex> held(stream->lock);
    if (stream->fetched <= layer) {
      const auto began = Clock::now();
      const bool came = stream->changed.wait_for(held, Seconds(timeout_s), [&] { return stream->fetched > layer; });
      stream->figures.stall_s += since(began);
      ++stream->figures.stalls;
      if (!came) return -1;
    }
    buffer = stream->buffer(step, layer);
  }
  const int64_t base = stream->index_of(0, layer);
  for (int32_t entry = 0; entry < step.entries; ++entry)
    step.blocks[step.at[entry]] = static_cast<int32_t>(buffer[step.which[entry]] - base);
  return 0;
}

void stream_leave(KvStream* stream, int32_t layer) {
  if (!stream->step->count && !stream->step->saves) return;
  std::lock_guard<std::mutex> held(stream->lock);
  stream->left = layer + 1;
  stream->changed.notify_all();
}

int32_t stream_end(KvStream* stream) {
  std::unique_lock<std::mutex> held(stream->lock);
  const bool has_failed = stream->left < stream->memory.layers;
  stream->is_over = true;
  stream->is_halting = stream->is_halting || has_failed;
  stream->changed.notify_all();
  stream->changed.wait(held, [&] { return !stream->is_saving && !(has_failed && stream->is_working); });
  return stream->saved;
}

void stream_halt(KvStream* stream) {
  std::unique_lock<std::mutex> held(stream->lock);
  stream->halt(held);
  stream->ahead = 0;
}

void stream_figures(KvStream* stream, StreamFigures* figures) {
  std::lock_guard<std::mutex> held(stream->lock);
  *figures = stream->figures;
}

void stream_load(KvStream* stream, const int32_t* from, const int32_t* to, int32_t count) {
  for (int32_t index = 0; index < count; ++index)
    for (int32_t layer = 0; layer < stream->memory.layers; ++layer)
      stream->bring(from[index], layer, stream->index_of(to[index], layer));
}

void stream_save(KvStream* stream, const int32_t* from, const int32_t* to, int32_t count) {
  for (int32_t index = 0; index < count; ++index) stream->take(from[index], to[index]);
}
}
