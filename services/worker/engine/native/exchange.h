// Questions between a debtor and a creditor, step by step and layer by layer, over a stream socket: asked, computed and
// answered without the interpreters' locks. Who may ask, about which blocks, is settled before, by a message that both
// interpreters see (services/worker/peers/attention/messages.py, `kv.native`); then the creditor's thread of that link is
// in kv_serve, and comes back to its interpreter now and then to have the grants looked at again. The debtor begins each
// step with its part (kv_step), and asks layer by layer (kv_ask, kv_take).
//
//   step:     header, then what `Spans` of a part has, as one array of int32, and its slots (int64)
//   question: header, queries [rows, q_heads, head_dim], new keys [kept, kv_heads, head_dim] and values, fp32
//   answer:   header, output [rows, q_heads, value_dim], log-sum-exp [rows, q_heads], fp32; the header alone on failure
//
// Every header has a digest over the rest of it and the payload. The socket does not block.
#pragma once
#include "attention.h"

extern "C" {

enum ExchangeAnswer : int32_t {
  EXCHANGE_PAUSED = 0,     // nothing is under way, and it is time to look at the grants again
  EXCHANGE_LATE = -10,     // a deadline passed
  EXCHANGE_LOST = -11,     // the peer hung up
  EXCHANGE_MANGLED = -12,  // what came is not what was sent, or not what is due
  EXCHANGE_STOPPED = -13,  // the debtor ends the exchange: messages follow
  EXCHANGE_FULL = -14,     // the creditor lends no more of its time: nothing was written, nothing computed
  EXCHANGE_STALE = -15,    // a step's part has blocks that are not lent to the debtor (any more)
};

struct Serving {
  int32_t fd;
  int32_t layers;
  const KvPool* pools;     // [layers]
  KvDigests* digests;      // [layers]
  const uint8_t* lent;     // [num_blocks]: to this debtor
  int32_t q_heads;
  int32_t threads;
  int32_t is_full;         // answer EXCHANGE_FULL to every step
  double idle_s;           // come back after so long without a step
  double turn_s;           // and after so long with steps
  double patience_s;       // for the next layer, and for an answer to be taken
  const char* ahead;       // bytes that were read from the socket before
  int64_t ahead_bytes;
  int64_t ahead_used;      // out
  double compute_s;        // out
  int32_t layer;           // out: the one at which it ended
};

// Until it is to come back, EXCHANGE_*, or what kv_attend and kv_write_sealed answer: the debtor is told that, and may
// only close the link.
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
  const int64_t* row;       // [rows]: which rows of `query` are asked about
  const int64_t* kept_row;  // [kept]: which rows of `key` and `value` the creditor keeps
  const Spans* spans;       // of the step's part
  int32_t blocks;           // in its tables
  const int64_t* slots;     // [rows], -1 for those that the creditor does not keep
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
  double compute_s;         // out: at the creditor
};

// Begin a step; send a layer's question; take its answer: 0, EXCHANGE_*, or the creditor's failure (see kv_serve).
KVASIR_API int32_t kv_step(Asking* asking);
KVASIR_API int32_t kv_ask(Asking* asking);
KVASIR_API int32_t kv_take(Asking* asking);
// Give a step up before its next layer; and, between two steps, end the exchange.
KVASIR_API int32_t kv_give_up(Asking* asking);
KVASIR_API int32_t kv_stop(Asking* asking);
}
