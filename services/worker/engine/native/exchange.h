// Protocol between debtor and creditor for distributed attention over a stream socket, without either GIL.
//
// A message to Python first authorises the debtor and its blocks (services/worker/peers/attention/messages.py,
// `kv.native`). The creditor's thread of the link then runs kv_serve, which returns regularly so that Python can check
// the grants. The debtor begins each step with its part (kv_step) and asks layer by layer (kv_ask, kv_take).
//
//   step:     header, then the part's `Spans` as one array of int32, and its slots (int64)
//   question: header, queries [rows, q_heads, head_dim], new keys [kept, kv_heads, head_dim] and values, fp32
//   answer:   header, output [rows, q_heads, value_dim], log-sum-exp [rows, q_heads], fp32; the header alone on failure
//
// Every header has a digest of its other fields and the payload. The socket is non-blocking.
#pragma once
#include "attention.h"

extern "C" {

enum ExchangeAnswer : int32_t {
  EXCHANGE_PAUSED = 0,     // idle; the grants are to be checked
  EXCHANGE_LATE = -10,     // a deadline passed
  EXCHANGE_LOST = -11,     // the peer closed the connection
  EXCHANGE_MANGLED = -12,  // a frame is corrupted or unexpected
  EXCHANGE_STOPPED = -13,  // the debtor ends the exchange: messages follow
  EXCHANGE_FULL = -14,     // the creditor has no computing time left: nothing was written or computed
  EXCHANGE_STALE = -15,    // a step's part has blocks that are not lent to the debtor
};

struct Serving {
  int32_t fd;
  int32_t layers;
  const KvPool* pools;     // [layers]
  KvDigests* digests;      // [layers]
  const uint8_t* lent;     // [num_blocks]: whether lent to this debtor
  int32_t q_heads;
  int32_t threads;
  int32_t is_full;         // answer EXCHANGE_FULL to every step
  double idle_s;           // return after this time without a step
  double turn_s;           // return after this time with steps
  double patience_s;       // timeout for the next layer and for sending an answer
  const char* ahead;       // bytes already read from the socket
  int64_t ahead_bytes;
  int64_t ahead_used;      // out
  double compute_s;        // out
  int32_t layer;           // out: the layer at which it ended
};

// Serves steps; returns EXCHANGE_* or an error of kv_attend or kv_write_sealed. After an error, which the debtor
// receives, the link must be closed.
KVASIR_API int32_t kv_serve(Serving* serving);

struct Asking {
  int32_t fd;
  int32_t layer;
  int32_t rows;
  int32_t kept;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  const int64_t* row;       // [rows]: rows of `query` to send
  const int64_t* kept_row;  // [kept]: rows of `key` and `value` that the creditor stores
  const Spans* spans;       // of the step's part
  int32_t blocks;           // number of blocks in its tables
  const int64_t* slots;     // [rows]; -1 for rows that the creditor does not store
  const float* query;
  int64_t query_stride;     // elements between rows; heads are contiguous
  const float* key;
  int64_t key_stride;
  const float* value;
  int64_t value_stride;
  float scaling;
  float softcap;
  double deadline_s;        // for sending, and again for the answer
  float* output;            // [rows, q_heads, value_dim]
  float* lse;               // [rows, q_heads]
  double compute_s;         // out: computing time at the creditor
};

// Begin a step, send a layer's question, receive its answer. Return 0, EXCHANGE_*, or the creditor's error (kv_serve).
KVASIR_API int32_t kv_step(Asking* asking);
KVASIR_API int32_t kv_ask(Asking* asking);
KVASIR_API int32_t kv_take(Asking* asking);
// Abandon a step before its next layer; end the exchange between two steps.
KVASIR_API int32_t kv_give_up(Asking* asking);
KVASIR_API int32_t kv_stop(Asking* asking);
}
