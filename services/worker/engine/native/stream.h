// Fetches KV blocks from host memory to the device, layer by layer, during the computation of a step.
//
// The device's arena has the blocks of all layers, layer by layer: K [layers * device_blocks, key_bytes], V likewise.
// A row of host memory has one block over all layers: K, then V, of layer 0, then of layer 1, … While layer l - 1 is
// computed, a thread copies layer l of the step's host blocks to the buffer l % 2 or to the block's place. Before layer
// l attends, the step's tables are updated.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct KvStream;  // the thread and its work

struct StreamMemory {
  uint8_t* key;
  uint8_t* value;
  uint8_t* host;
  int64_t key_bytes;    // of one block of one layer
  int64_t value_bytes;
  int32_t layers;
  int32_t device_blocks;
};

// Copies of one step. It and its arrays must live until the next `stream_begin` or `stream_halt`.
struct StreamStep {
  int32_t count;             // blocks to fetch
  int32_t kept;              // the first `kept` of them were in the same buffers in the previous step
  const int32_t* from;       // [count]: rows of host memory
  const int32_t* place;      // [count]: device block where it stays; -1: it uses a buffer
  const int32_t* buffer[2];  // [count]: arena places of its two buffers; unused with a place
  int32_t entries;           // number of entries of `blocks` for buffered blocks
  const int32_t* at;         // [entries]: indices of those entries
  const int32_t* which;      // [entries]: index of the fetched block
  int32_t* blocks;           // the step's tables, as in `Spans`
  int32_t saves;             // blocks to save after the fetches, until the step ends
  const int32_t* save_from;  // [saves]: device blocks
  const int32_t* save_to;    // [saves]: rows of host memory
};

// Sums since the start.
struct StreamFigures {
  double stall_s;  // waits of the computation
  double fetch_s;  // copies to the device, including the pace
  double save_s;   // copies to the host
  int64_t stalls;  // layers that the computation waited for
  int64_t layers;  // fetched layers
  int64_t early;   // layers fetched before the previous layer had attended
  int64_t fetched; // fetched blocks, counted per layer
  int64_t saved;   // saved blocks, with all layers
};

// Starts the thread.
KvStream* stream_open(const StreamMemory* memory);
// Ends the thread.
void stream_close(KvStream* stream);

// Limits the bytes per second in each direction; 0: no limit.
void stream_pace(KvStream* stream, double in_bytes_s, double out_bytes_s);

// Begins a step and the copies of its first layers.
void stream_begin(KvStream* stream, const StreamStep* step);
// Waits for the blocks of `layer` and updates the tables. Returns 0, or -1 after `timeout_s`.
int32_t stream_enter(KvStream* stream, int32_t layer, double timeout_s);
// Releases the layer's buffer.
void stream_leave(KvStream* stream, int32_t layer);
// Ends the step, computed or not, and skips the remaining saves. Returns the number of saves done, in order.
// Fetches the first two layers again, for a next step with the same blocks.
int32_t stream_end(KvStream* stream);
// Ends all copies and drops the layers fetched for the next step.
void stream_halt(KvStream* stream);
void stream_figures(KvStream* stream, StreamFigures* figures);

// Copies whole blocks in this thread: rows of host memory to blocks of the device, and back.
void stream_load(KvStream* stream, const int32_t* from, const int32_t* to, int32_t count);
void stream_save(KvStream* stream, const int32_t* from, const int32_t* to, int32_t count);
}
#pragma GCC visibility pop
