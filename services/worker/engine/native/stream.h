// Blocks of KV that lie in host memory, brought to the device layer by layer behind the computation.
//
// The device's arena has the blocks of all layers, layer by layer: K [layers * device_blocks, key_bytes], V likewise.
// A row of host memory has one block over all layers: K, then V, of layer 0, then of layer 1, … A step names the
// blocks it reads that are outside; a thread copies their part of layer l into the buffer l % 2 (or to the place where
// a block is to stay) while layer l - 1 is computed, and before layer l attends its tables are made to point there.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct KvStream;  // the thread and what it works on

struct StreamMemory {
  uint8_t* key;
  uint8_t* value;
  uint8_t* host;
  int64_t key_bytes;    // of one block of one layer
  int64_t value_bytes;
  int32_t layers;
  int32_t device_blocks;
};

// What one step reads from outside, and what is to be saved there meanwhile. It and its arrays must live until the next
// `stream_begin` or `stream_halt`.
struct StreamStep {
  int32_t count;             // blocks that are brought in
  int32_t kept;              // of them, the first: the step before had them in the same buffers
  const int32_t* from;       // [count]: rows of host memory
  const int32_t* place;      // [count]: the device's block where it stays, or -1: it goes through a buffer
  const int32_t* buffer[2];  // [count]: where in the arena, for one layer and for the next; not read for a placed one
  int32_t entries;           // of `blocks` that are for what goes through a buffer
  const int32_t* at;         // [entries]: which entries those are
  const int32_t* which;      // [entries]: of the `count`
  int32_t* blocks;           // the step's tables, as `Spans` has them
  int32_t saves;             // blocks copied out once all is brought in, while there is time
  const int32_t* save_from;  // [saves]: the device's blocks
  const int32_t* save_to;    // [saves]: rows of host memory
};

// Sums since the start.
struct StreamFigures {
  double stall_s;  // the computation waited
  double fetch_s;  // copies in took, paces included
  double save_s;   // copies out took
  int64_t stalls;  // layers that were waited for
  int64_t layers;  // that were brought in
  int64_t early;   // of them, those that were there before the layer before had attended
  int64_t fetched; // blocks of one layer
  int64_t saved;   // blocks of all layers
};

// Starts the thread.
KvStream* stream_open(const StreamMemory* memory);
// Ends it.
void stream_close(KvStream* stream);

// Bytes per second in each direction, 0: as fast as memory.
void stream_pace(KvStream* stream, double in_bytes_s, double out_bytes_s);

// A step begins: copies for its first layers do.
void stream_begin(KvStream* stream, const StreamStep* step);
// Layer `layer` is to attend: returns 0 once its blocks are there and the tables say where, -1 after `timeout_s`.
int32_t stream_enter(KvStream* stream, int32_t layer, double timeout_s);
// It has attended: its buffer may be filled anew.
void stream_leave(KvStream* stream, int32_t layer);
// The step is over, computed or not: returns how many of its `saves`, from the first on, are done. No other begins.
// The first two layers are brought in once more, for a next step that reads the same.
int32_t stream_end(KvStream* stream);
// Returns when nothing is under way; what was brought in for the next step is forgotten.
void stream_halt(KvStream* stream);
void stream_figures(KvStream* stream, StreamFigures* figures);

// Whole blocks, in this thread: rows of host memory to blocks of the device, and back.
void stream_load(KvStream* stream, const int32_t* from, const int32_t* to, int32_t count);
void stream_save(KvStream* stream, const int32_t* from, const int32_t* to, int32_t count);
}
#pragma GCC visibility pop
