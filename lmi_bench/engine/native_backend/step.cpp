// One step of a decoder on CPU cores: rows of any mix of prompts and decoding sequences in, logits
// or likeliest tokens out, keys and values into a paged cache. A C ABI, no library but the system's.
//
// The file includes itself once for each instruction set, and the copy is chosen at run time by the
// processor: the kernels use vectors of W floats (GCC's vector extension), so that one source serves
// AVX-512, AVX2 and other instruction sets of the compiler.
//
// Weights are in panels of 64 outputs. float32: [outputs/64][inputs][64]; bfloat16: pairs of
// inputs, [outputs/64][inputs/2][64][2], which a 16-bit shift or mask widens in a register, and
// which AVX512-BF16 multiplies directly; int8: [outputs/64][inputs][64] and a scale per output.
// Missing outputs of the last panel are zero.
//
// The cache has a page per head: keys [head_dim][block] and values [block][head_dim] (float32), or
// pairs, keys [head_dim/2][block][2] and values [block/2][head_dim][2] (bfloat16). Scores and sums
// of values are then the same product as a linear layer's.
//
// Every sum adds its terms in one fixed order, independent of the rest of the step: a sequence's
// logits are bit-identical in any batch, chunk or number of threads.

#ifndef LMI_KERNELS  // the part that is compiled once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {

enum LmiKind : int64_t { LMI_F32 = 0, LMI_BF16 = 1, LMI_INT8 = 2 };

// y = x W^T * scale + bias; scale and bias have a value for every output of the panels, or are null
struct LmiLinear {
  const void* data;
  const float* scale;
  const float* bias;
  int64_t inputs, outputs, kind;
};

// gate_up: panels of 32 rows of the gate, then the 32 rows of the same features of the other one
struct LmiLayer {
  LmiLinear qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm;
  const float *attention_out_norm, *mlp_out_norm;  // of what is added to x; null: none
  const float *query_norm, *key_norm;  // null: heads are not normalised
  void *keys, *values;
  int64_t window;  // tokens seen, itself included; 0: all
};

struct LmiModel {
  int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
  int64_t block_size, cache_kind, embedding_kind;
  int64_t threads;
  int64_t gelu;  // in place of silu, approximated by tanh
  float norm_eps, scale;
  float embedding_scale, score_cap, logit_cap;  // cap 0: none
  const LmiLayer* layer;
  const float* final_norm;
  const void* embedding;  // [vocab][hidden]
  LmiLinear head;
  const float* frequencies;  // [head_dim/2], radians a position
  const float* window_frequencies;  // of layers with a window; null: the same
  float amplitude;           // of cosines and sines
  // dynamic RoPE: frequencies / (factor * length / trained - factor + 1) ^ (power * exponent)
  float growth_factor, growth_power, trained_length;  // factor 0: none
};

struct LmiSequence {
  int64_t first_row, rows, first_position;
  int64_t first_block;  // of this sequence's table in `tables`
};

struct LmiStep {
  int64_t rows, sequences, sampled;
  const int32_t* token_ids;     // [rows]
  const LmiSequence* sequence;  // [sequences]
  const int32_t* tables;        // block ids of all sequences, one after the other
  const int32_t* sampled_rows;  // [sampled]
  float* logits;                // [sampled][vocab], or null
  int32_t* likeliest;           // [sampled], or null
};
}

namespace lmi {

typedef uint16_t bf16;

constexpr int64_t PANEL = 64;         // outputs that are computed together
constexpr int64_t CHUNK_INPUTS = 256; // inputs whose weights stay in the L2 cache
constexpr int64_t CHUNK_ROWS = 240;   // rows that share one pass over a panel
constexpr int64_t CONTEXT = 512;      // cached tokens between two corrections of the softmax
constexpr int64_t QUERY_ROWS = 12;    // rows of heads that read a page together
constexpr int64_t TOGETHER = 24;      // rows of heads of a piece, over all of its KV heads
constexpr int SIDE_BY_SIDE = 4;       // groups of 16 tokens whose scores are summed in parallel
constexpr int64_t PAGES_AHEAD = 2;    // prefetch distance in cache pages
constexpr int64_t ROWS_A_PIECE = 8;   // rows per piece of row-wise work
constexpr int64_t KEPT_TOGETHER = 64; // rows of a piece that writes into the cache
constexpr int64_t STREAM_AHEAD = 4096;// prefetch distance in bytes for a weight that is read once

inline float widened(bf16 v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline bf16 rounded(float f) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Memory that only grows, in large pages if the system has them: faster sequential reads
class Buffer {
 public:
  ~Buffer() { free(data_); }
  void* bytes(size_t size) {
    if (size > size_) {
      free(data_);
      size_ = (size + (size_t(2) << 20) - 1) & ~((size_t(2) << 20) - 1);
      data_ = nullptr;
      if (posix_memalign(&data_, size_t(2) << 20, size_)) { size_ = 0; throw std::bad_alloc(); }
#if defined(__linux__)
      madvise(data_, size_, MADV_HUGEPAGE);
#endif
      memset(data_, 0, size_);
    }
    return data_;
  }
  float* floats(size_t count) { return static_cast<float*>(bytes(count * 4)); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Threads that share the pieces of successive loops. The caller leads: it opens a loop, takes pieces
// like the helpers, and returns when all are done. It waits only for helpers that work on a piece: a
// helper that the system has descheduled delays the loop by at most that piece, and the other
// threads do the rest. Threads are not pinned to cores.
//
// A waiting thread spins for the usual duration of the last pieces, then yields its core, and then
// sleeps, so that the system can run another thread there.
class Team {
 public:
  typedef void (*Work)(const void* data, int64_t piece, int64_t me);

  // Throws std::system_error if the system refuses a thread; running threads are joined first, since
  // destroying an unjoined one would end the process
  explicit Team(int64_t size) : size_(size) {
    try {
      for (int64_t me = 1; me < size; me++) threads_.emplace_back([this, me] { help(me); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Team() { end(); }

  int64_t size() const { return size_; }

  // work(data, piece, me) once for every piece below `count`, on any free thread
  void run(int64_t count, Work work, const void* data) {
    if (size_ == 1 || count == 1) {  // waking a helper takes longer
      for (int64_t piece = 0; piece < count; piece++) work(data, piece, 0);
      return;
    }
    if (uint64_t(count) > MOST_PIECES) throw std::bad_alloc();
    work_ = work;
    data_ = data;
    done_.store(0, std::memory_order_relaxed);
    open(count);
    for (uint64_t piece; (piece = loop_.fetch_add(1, std::memory_order_acq_rel) & MOST_PIECES) <
                         uint64_t(count);) {
      work(data, int64_t(piece), 0);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
    wait([&] { return done_.load(std::memory_order_acquire) == uint32_t(count); }, finished_);
  }

 private:
  // A loop in one word, so that a piece and its loop are claimed atomically: the loop's number, its
  // number of pieces, and how many are taken
  static constexpr int COUNT_BITS = 24;
  static constexpr uint64_t MOST_PIECES = (uint64_t(1) << COUNT_BITS) - 1;
  static uint64_t number_of(uint64_t loop) { return loop >> (2 * COUNT_BITS); }
  static uint64_t count_of(uint64_t loop) { return loop >> COUNT_BITS & MOST_PIECES; }

  // Threads sleep here until it rings
  struct Bell {
    std::mutex mutex;
    std::condition_variable rung;
    std::atomic<int> sleepers{0};

    void ring() {
      if (!sleepers.load(std::memory_order_seq_cst)) return;
      { std::lock_guard<std::mutex> lock(mutex); }
      rung.notify_all();
    }
  };

  template <class Ready>
  static void wait(Ready ready, Bell& bell) {
    using clock = std::chrono::steady_clock;
    for (int spins = 0; spins < 64; spins++) {
      if (ready()) return;
      pause();
    }
    const auto start = clock::now();
    for (auto spent = clock::duration(0); spent < SPIN + YIELD; spent = clock::now() - start) {
      for (int spins = 0; spins < 16; spins++) {
        if (ready()) return;
        pause();
      }
      if (spent > SPIN) std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(bell.mutex);
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bell.rung.wait(lock, ready);
    bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  void open(int64_t count) {
    number_++;
    loop_.store(number_ << (2 * COUNT_BITS) | uint64_t(count) << COUNT_BITS,
                std::memory_order_seq_cst);
    opened_.ring();
  }

  void help(int64_t me) {
    uint64_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      for (;;) {
        const uint64_t loop = loop_.fetch_add(1, std::memory_order_acq_rel);
        const uint64_t piece = loop & MOST_PIECES;
        seen = number_of(loop);
        if (piece >= count_of(loop)) break;
        work_(data_, int64_t(piece), me);
        // the leader may go on with the next loop as soon as the last piece is counted
        if (done_.fetch_add(1, std::memory_order_seq_cst) + 1 == count_of(loop)) finished_.ring();
      }
      wait(
          [&] {
            return number_of(loop_.load(std::memory_order_seq_cst)) != seen ||
                   stop_.load(std::memory_order_relaxed);
          },
          opened_);
    }
  }

  void end() {
    stop_.store(true);
    open(0);
    for (auto& thread : threads_) thread.join();
  }

  static constexpr std::chrono::microseconds SPIN{20}, YIELD{200};

  int64_t size_;
  std::vector<std::thread> threads_;
  Work work_ = nullptr;
  const void* data_ = nullptr;
  uint64_t number_ = 0;
  std::atomic<bool> stop_{false};
  Bell opened_, finished_;
  alignas(64) std::atomic<uint64_t> loop_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
};

// Rows of one sequence that read its pages together, and the KV heads whose pages they read in turn:
// a block's heads are contiguous, and long reads are fast
struct Queries {
  int64_t sequence, first, count;
  int64_t first_head, heads;
};

// Offsets in bytes of 16 tokens of a head in the cache
struct Sixteen {
  int64_t key, value;
};

// Working memory of one thread
struct Scratch {
  float *sums, *wide, *queries, *scores, *out, *top, *total;
  Sixteen* at;
  int64_t span;  // capacity of `scores` in cached tokens
};

struct Engine;
typedef void (*StepFunction)(Engine&);

struct Engine {
  LmiModel model;
  std::vector<LmiLayer> layers;
  std::unique_ptr<Team> team;
  StepFunction step_function = nullptr;
  const char* variant = "";
  bool narrow_rows = false;  // rows enter products as bfloat16

  // the step in progress
  const LmiStep* step = nullptr;
  std::vector<Queries> queries;
  std::vector<int32_t> position;  // [rows]
  std::vector<int32_t> sequence;  // [rows]
  int64_t query_rows = 1;
  int64_t x_stride = 0, h_stride = 0, qkv_stride = 0, attended_stride = 0, inner_stride = 0;
  float *x = nullptr, *last_x = nullptr, *added = nullptr, *qkv = nullptr, *turn = nullptr, *best = nullptr;
  char *h = nullptr, *attended = nullptr, *last_attended = nullptr, *inner = nullptr;
  int32_t* best_id = nullptr;
  Buffer buffers[11];
  std::vector<Buffer> scratch_memory;
  std::vector<Scratch> scratch;  // one per thread
};

inline int64_t panels(const LmiLinear& w) { return (w.outputs + PANEL - 1) / PANEL; }

}  // namespace lmi

#define LMI_KERNELS
#define LMI_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LMI_TARGET(sets) \
  LMI_PRAGMA(clang attribute push(__attribute__((target(sets))), apply_to = function))
#define LMI_TARGET_END LMI_PRAGMA(clang attribute pop)
#else
#define LMI_TARGET(sets) LMI_PRAGMA(GCC push_options) LMI_PRAGMA(GCC target(sets))
#define LMI_TARGET_END LMI_PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__)
#define LMI_NAME avx512_bf16
#define LMI_WIDTH 16
#define LMI_DOT 1
LMI_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#include __FILE__
LMI_TARGET_END

#define LMI_NAME avx512
#define LMI_WIDTH 16
#define LMI_DOT 0
LMI_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#include __FILE__
LMI_TARGET_END

#define LMI_NAME avx2
#define LMI_WIDTH 8
#define LMI_DOT 0
LMI_TARGET("avx2,fma")
#include __FILE__
LMI_TARGET_END
#endif

#define LMI_NAME portable
#define LMI_WIDTH 4
#define LMI_DOT 0
#include __FILE__

namespace lmi {

// A copy of the kernels
struct Variant {
  const char* name;
  StepFunction step;
  bool dot;
};

#if defined(__x86_64__)
// True if the bfloat16 product is as fast as the float32 one; measured alternately, so that changes
// of the core's frequency affect both
bool dot_is_fast() {
  double halves_s = 1.0, floats_s = 1.0;
  for (int round = 0; round < 10; round++) {
    halves_s = std::min(halves_s, avx512_bf16::trial_s());
    floats_s = std::min(floats_s, avx512::trial_s());
  }
  return halves_s < 1.1 * floats_s;
}
#endif

// Variants that this processor can run, fastest first
const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = [] {
    std::vector<Variant> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool dot = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(LMI_IMITATE_DOT) || defined(LMI_ASSUME_DOT)  // a machine may hide what it has
    dot = avx512;
#endif
    if (avx512) found.push_back({"avx512", avx512::step, false});
    if (dot)  // twice as fast on AMD's Zen 4, half as fast on Intel's Emerald Rapids
      found.insert(dot_is_fast() ? found.begin() : found.end(),
                   {"avx512_bf16", avx512_bf16::step, true});
    if (avx2) found.push_back({"avx2", avx2::step, false});
#endif
    found.push_back({"portable", portable::step, false});
    return found;
  }();
  return all;
}

const Variant* chosen(const char* name) {
  for (auto& variant : variants())
    if (!name || !*name || !strcmp(name, variant.name)) return &variant;
  return nullptr;
}

// Few heads per piece if there are few sequences, so that every thread has work
void share_out_queries(Engine& e, const LmiStep& s) {
  const LmiModel& m = e.model;
  int64_t single = 0;
  for (int64_t i = 0; i < s.sequences; i++)
    single += (s.sequence[i].rows + e.query_rows - 1) / e.query_rows * m.kv_heads;
  const int64_t most = std::max<int64_t>(1, single / (4 * e.team->size()));
  e.queries.clear();
  for (int64_t i = 0; i < s.sequences; i++) {
    for (int64_t r = 0; r < s.sequence[i].rows; r += e.query_rows) {
      const int64_t count = std::min(e.query_rows, s.sequence[i].rows - r);
      const int64_t lines = count * (m.heads / m.kv_heads);
      const int64_t together = std::max<int64_t>(1, std::min(most, TOGETHER / lines));
      for (int64_t head = 0; head < m.kv_heads; head += together)
        e.queries.push_back({i, r, count, head, std::min(together, m.kv_heads - head)});
    }
  }
}

// The step's layout: which rows read their pages together, and each row's position
void lay_out(Engine& e, const LmiStep& s) {
  e.position.resize(s.rows);
  e.sequence.resize(s.rows);
  for (int64_t i = 0; i < s.sequences; i++) {
    const LmiSequence& sequence = s.sequence[i];
    for (int64_t r = 0; r < sequence.rows; r++) {
      e.position[sequence.first_row + r] = int32_t(sequence.first_position + r);
      e.sequence[sequence.first_row + r] = int32_t(i);
    }
  }
  share_out_queries(e, s);
}

Scratch scratch_in(Buffer& memory, const Engine& e) {
  const LmiModel& m = e.model;
  const int64_t heads = std::max(TOGETHER, e.query_rows * (m.heads / m.kv_heads));
  const int64_t span = std::max(m.block_size, CONTEXT / m.block_size * m.block_size);
  const int64_t sizes[] = {CHUNK_ROWS * PANEL, CHUNK_INPUTS * PANEL, heads * m.head_dim,
                           heads * span,       heads * m.head_dim,   heads,
                           heads,              heads * span / 16 * int64_t(sizeof(Sixteen) / 4)};
  int64_t starts[9] = {0};
  for (int i = 0; i < 8; i++) starts[i + 1] = starts[i] + (sizes[i] + 15) / 16 * 16;
  float* at = memory.floats(starts[8]);
  return {at,
          at + starts[1],
          at + starts[2],
          at + starts[3],
          at + starts[4],
          at + starts[5],
          at + starts[6],
          (Sixteen*)(at + starts[7]),
          span};
}

void take_memory(Engine& e, const LmiStep& s) {
  const LmiModel& m = e.model;
  size_t rows = s.rows, sampled = s.sampled, row_bytes = e.narrow_rows ? 2 : 4;
  e.x = e.buffers[0].floats(rows * e.x_stride);
  e.h = (char*)e.buffers[1].bytes(rows * e.h_stride * row_bytes);
  e.qkv = e.buffers[2].floats(rows * e.qkv_stride);
  e.attended = (char*)e.buffers[3].bytes(rows * e.attended_stride * row_bytes);
  e.inner = (char*)e.buffers[4].bytes(rows * e.inner_stride * row_bytes);
  e.turn = e.buffers[5].floats(rows * m.head_dim * 2);
  e.last_x = e.buffers[6].floats(sampled * e.x_stride);
  e.last_attended = (char*)e.buffers[7].bytes(sampled * e.attended_stride * row_bytes);
  e.best = e.buffers[8].floats(sampled * panels(m.head));
  e.best_id = (int32_t*)e.buffers[9].floats(sampled * panels(m.head));
  e.added = e.buffers[10].floats(rows * e.x_stride);
}

}  // namespace lmi

using namespace lmi;

extern "C" {

// Names of the copies that this processor can run, best first, comma-separated
const char* lmi_variants() {
  static const std::string names = [] {
    std::string text;
    for (auto& variant : variants()) text += (text.empty() ? "" : ",") + std::string(variant.name);
    return text;
  }();
  return names.c_str();
}

// Null without memory, threads or a copy with this name; an empty name selects the best. The
// arguments' pointers must stay valid.
void* lmi_open(const LmiModel* model, const char* variant_name) {
  const Variant* variant = chosen(variant_name);
  if (!variant) return nullptr;
  try {
    std::unique_ptr<Engine> e(new Engine);
    e->model = *model;
    e->layers.assign(model->layer, model->layer + model->layers);
    e->step_function = variant->step;
    e->narrow_rows = variant->dot && e->layers[0].qkv.kind == LMI_BF16;
    auto padded = [](int64_t n) { return (n + PANEL - 1) / PANEL * PANEL + 16; };
    e->x_stride = e->h_stride = padded(model->hidden);
    e->qkv_stride = padded(e->layers[0].qkv.outputs);
    e->attended_stride = padded(model->heads * model->head_dim);
    e->inner_stride = padded(model->ffn);
    e->query_rows = std::max<int64_t>(1, QUERY_ROWS * model->kv_heads / model->heads);
    e->scratch_memory = std::vector<Buffer>(model->threads);
    for (auto& memory : e->scratch_memory) e->scratch.push_back(scratch_in(memory, *e));
    e->team.reset(new Team(model->threads));
    return e.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// 0, or 1 if out of memory
int lmi_step(void* engine, const LmiStep* step) {
  Engine& e = *static_cast<Engine*>(engine);
  try {
    e.step = step;
    lay_out(e, *step);
    take_memory(e, *step);
    e.step_function(e);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

void lmi_close(void* engine) { delete static_cast<Engine*>(engine); }
}

#else  // the kernels, once per instruction set

namespace lmi {
namespace LMI_NAME {

#define LMI_INLINE static inline __attribute__((always_inline))

constexpr int64_t W = LMI_WIDTH;
constexpr int NARROW = 16 / W;  // vectors of 16 columns

// Tiles whose sums stay in registers, in rows and vectors of columns: a wide one reads whole panels,
// a tall one widens and loads each weight for more rows
constexpr int WIDE_ROWS = 6, WIDE = W == 16 ? 4 : NARROW;
constexpr int TALL_ROWS = W == 16 ? 13 : 6, TALL = W == 16 ? 2 : NARROW;
constexpr int TALL_LEAST = (TALL_ROWS + 1) / 2;  // of TALL_ROWS + 1 rows, shared out evenly

typedef float Vector __attribute__((vector_size(W * 4)));
typedef int32_t Integers __attribute__((vector_size(W * 4)));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));
typedef uint64_t Longs __attribute__((vector_size(W * 4)));
typedef float LooseVector __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t LooseBits __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));

LMI_INLINE Vector load(const float* p) { return *(const LooseVector*)p; }
LMI_INLINE void store(float* p, Vector v) { *(LooseVector*)p = v; }
LMI_INLINE Vector all(float f) { return Vector{} + f; }

LMI_INLINE Vector highest(Vector a, Vector b) { return a > b ? a : b; }

LMI_INLINE float sum(Vector v) {
  float total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

LMI_INLINE float highest(Vector v) {
  float most = v[0];
  for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// e^x to about one unit in the last place; 0 below -87 (Cephes' polynomial)
LMI_INLINE Vector exponential(Vector x) {
  const Vector round = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vector clamped = x < -87.0f ? all(-87.0f) : x;
  clamped = clamped > 88.0f ? all(88.0f) : clamped;
  Vector shifted = clamped * 1.44269504088896341f + round;
  Vector n = shifted - round;
  Vector r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Vector result = p * (Vector)((((Integers)shifted - (Integers)round) + 127) << 23);
  return x < -87.0f ? Vector{} : result;
}

// Round to bfloat16 in the lower half of each number, to the nearest, ties to even
LMI_INLINE Bits halves_of(Vector v) {
  const Bits bits = (Bits)v;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Input rows of a product: float32, or bfloat16 if the processor multiplies that
struct Rows {
  char* data;
  int64_t stride;
  bool narrow;

  const float* wide(int64_t row) const { return (const float*)data + row * stride; }
  const bf16* halves(int64_t row) const { return (const bf16*)data + row * stride; }

  void put(int64_t row, int64_t column, Vector v) const {
    if (!narrow) return store((float*)data + row * stride + column, v);
    bf16* to = (bf16*)data + row * stride + column;
    for (int i = 0; i < W; i++) to[i] = rounded(v[i]);
  }
};

// Products of a tile: M rows by C vectors of columns, y (+)= x w. Every step along the inputs
// prefetches LINES cache lines at `ahead`, which then advances by `hop` bytes.

template <int M, int C>
LMI_INLINE void begin(Vector (&sums)[M][C], const float* y, int64_t ys, bool add) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) sums[m][c] = add ? load(y + m * ys + c * W) : Vector{};
}

template <int M, int C>
LMI_INLINE void end(const Vector (&sums)[M][C], float* y, int64_t ys) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) store(y + m * ys + c * W, sums[m][c]);
}

struct Floats {  // w[k][stride]
  typedef float Row;
  static constexpr int STEP = 1;  // inputs of a step
  LMI_INLINE void widen(const char* w, Vector (&of)[STEP]) { of[0] = load((const float*)w); }
  template <int M, int C, int LINES>
  LMI_INLINE void tile(const float* x, int64_t xs, const void* weights, int64_t stride, int64_t k,
                       float* y, int64_t ys, bool add, const char* ahead, int64_t hop) {
    const float* w = (const float*)weights;
    Vector sums[M][C];
    begin(sums, y, ys, add);
    for (int64_t i = 0; i < k; i++) {
      Vector column[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) column[c] = load(w + i * stride + c * W);
#pragma GCC unroll 16
      for (int line = 0; line < LINES; line++)
        __builtin_prefetch(ahead + i * hop + line * 64, 0, 2);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        float f = x[m * xs + i];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) sums[m][c] += column[c] * f;
      }
    }
    end(sums, y, ys);
  }
};

struct Pairs {  // bfloat16 w[k/2][stride][2], widened in registers
  typedef float Row;
  static constexpr int STEP = 2;
  LMI_INLINE void widen(const char* w, Vector (&of)[STEP]) {
    const Bits pairs = *(const LooseBits*)w;
    of[0] = (Vector)(pairs << 16);
    of[1] = (Vector)(pairs & 0xffff0000u);
  }
  template <int M, int C, int LINES>
  LMI_INLINE void tile(const float* x, int64_t xs, const void* weights, int64_t stride, int64_t k,
                       float* y, int64_t ys, bool add, const char* ahead, int64_t hop) {
    const uint32_t* w = (const uint32_t*)weights;
    Vector sums[M][C];
    begin(sums, y, ys, add);
    for (int64_t i = 0; i < k / 2; i++) {
      Vector column[C];
#pragma GCC unroll 16
      for (int line = 0; line < LINES; line++)
        __builtin_prefetch(ahead + i * hop + line * 64, 0, 2);
#pragma GCC unroll 16
      for (int c = 0; c < C; c++)
        column[c] = (Vector)(*(const LooseBits*)(w + i * stride + c * W) << 16);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        float f = x[m * xs + 2 * i];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) sums[m][c] += column[c] * f;
      }
#pragma GCC unroll 16
      for (int c = 0; c < C; c++)
        column[c] = (Vector)(*(const LooseBits*)(w + i * stride + c * W) & 0xffff0000u);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        float f = x[m * xs + 2 * i + 1];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) sums[m][c] += column[c] * f;
      }
    }
    end(sums, y, ys);
  }
};

#if LMI_DOT
LMI_INLINE Vector dot(Vector total, Bits weights, uint32_t row) {
#if defined(LMI_IMITATE_DOT)
  Vector low = (Vector)(weights << 16), high = (Vector)(weights & 0xffff0000u);
  return total + (low * widened(bf16(row)) + high * widened(bf16(row >> 16)));
#else
  return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights,
                                  (__m512bh)_mm512_set1_epi32(int(row)));
#endif
}

struct DotPairs {  // bfloat16 w[k/2][stride][2] times bfloat16 rows
  typedef bf16 Row;
  static constexpr int STEP = 2;
  template <int M, int C, int LINES>
  LMI_INLINE void tile(const bf16* x, int64_t xs, const void* weights, int64_t stride, int64_t k,
                       float* y, int64_t ys, bool add, const char* ahead, int64_t hop) {
    const uint32_t* w = (const uint32_t*)weights;
    Vector sums[M][C];
    begin(sums, y, ys, add);
    for (int64_t i = 0; i < k / 2; i++) {
      Bits column[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) column[c] = *(const LooseBits*)(w + i * stride + c * W);
#pragma GCC unroll 16
      for (int line = 0; line < LINES; line++)
        __builtin_prefetch(ahead + i * hop + line * 64, 0, 2);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        uint32_t pair;
        memcpy(&pair, x + m * xs + 2 * i, 4);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) sums[m][c] = dot(sums[m][c], column[c], pair);
      }
    }
    end(sums, y, ys);
  }
};
#endif

// One tile of LEAST to MOST rows
template <class Weights, int LEAST, int MOST, int C, int LINES>
static void tile(int64_t rows, const typename Weights::Row* x, int64_t xs, const char* w,
                 int64_t stride, int64_t k, float* y, int64_t ys, bool add, const char* ahead,
                 int64_t hop) {
  if constexpr (MOST > LEAST)
    if (rows < MOST)
      return tile<Weights, LEAST, MOST - 1, C, LINES>(rows, x, xs, w, stride, k, y, ys, add, ahead,
                                                      hop);
  Weights::template tile<MOST, C, LINES>(x, xs, w, stride, k, y, ys, add, ahead, hop);
}

// y[rows][columns] (+)= x w for columns in sixteens. The first `asking` tiles prefetch from `ahead`
// on, `hop` bytes per step.
template <class Weights, int LEAST, int MOST, int C, int LINES>
static void tiles(int64_t rows, int64_t columns, const typename Weights::Row* x, int64_t xs,
                  const char* w, int64_t stride, int64_t k, float* y, int64_t ys, bool add,
                  const char* ahead, int64_t hop, int64_t asking) {
  constexpr int64_t COLUMN_BYTES = 4;  // of a step: one float or a pair of halves
  const int64_t count = (rows + MOST - 1) / MOST;
  for (int64_t t = 0, first = 0; t < count; t++) {
    const int64_t height = (rows - first + count - t - 1) / (count - t);
    const typename Weights::Row* from = x + first * xs;
    float* to = y + first * ys;
    int64_t c = 0;
    for (; c + C * W <= columns; c += C * W) {
      const char* column = w + c * COLUMN_BYTES;
      const bool asks = asking-- > 0;
      tile<Weights, LEAST, MOST, C, LINES>(height, from, xs, column, stride, k, to + c, ys, add,
                                           asks ? ahead : column, asks ? hop : 0);
      ahead += k / Weights::STEP * hop;
    }
    if (c < columns)
      tiles<Weights, 1, WIDE_ROWS, NARROW, 0>(height, columns - c, from, xs, w + c * COLUMN_BYTES,
                                              stride, k, to + c, ys, add, nullptr, 0, 0);
    first += height;
  }
}

// As `tiles`, in the best shape for this number of rows; prefetches as many following bytes as it
// reads, in all of its tiles or the first few
template <class Weights>
static void product(int64_t rows, int64_t columns, const typename Weights::Row* x, int64_t xs,
                    const char* w, int64_t stride, int64_t k, float* y, int64_t ys, bool add,
                    const char* ahead) {
  if (rows <= WIDE_ROWS)
    return tiles<Weights, 1, WIDE_ROWS, WIDE, 4>(rows, columns, x, xs, w, stride, k, y, ys, add,
                                                 ahead, 256, 1);
  const bool one = rows <= TALL_ROWS;
  tiles<Weights, TALL_LEAST, TALL_ROWS, TALL, 2>(rows, columns, x, xs, w, stride, k, y, ys, add,
                                                 ahead, one ? 128 : 64, one ? 2 : 4);
}

#if LMI_WIDTH == 16
// Seconds of a few products of one panel, as in a batch
double trial_s() {
  constexpr int64_t ROWS = TALL_ROWS, INPUTS = CHUNK_INPUTS;
  std::vector<float> rows(ROWS * INPUTS), sums(ROWS * PANEL);
  std::vector<uint32_t> panel(INPUTS / 2 * PANEL);
  const auto start = std::chrono::steady_clock::now();
  for (int times = 0; times < 8; times++) {
#if LMI_DOT
    product<DotPairs>(ROWS, PANEL, (const bf16*)rows.data(), INPUTS, (const char*)panel.data(), PANEL,
                      INPUTS, sums.data(), PANEL, true, (const char*)panel.data());
#else
    product<Pairs>(ROWS, PANEL, rows.data(), INPUTS, (const char*)panel.data(), PANEL, INPUTS,
                   sums.data(), PANEL, true, (const char*)panel.data());
#endif
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
#endif

// Linear layers

LMI_INLINE int64_t bytes_an_input(const LmiLinear& w) {  // in a panel
  return PANEL * (w.kind == LMI_F32 ? 4 : w.kind == LMI_BF16 ? 2 : 1);
}

LMI_INLINE const char* panel_at(const LmiLinear& w, int64_t panel) {
  return (const char*)w.data + panel * w.inputs * bytes_an_input(w);
}

static void widen_bytes(const char* from, int64_t k, float* to) {
  for (int64_t i = 0; i < k * PANEL; i += W)
    store(to + i, __builtin_convertvector(*(const Bytes*)(from + i), Vector));
}

// sums[rows][PANEL] = x[first ..] times one panel; `next` is read after it. Prefetches a few lines of
// the same panel if one tile streams it, else the next chunk.
static void panel_sums(const LmiLinear& w, int64_t panel, const Rows& x, int64_t first, int64_t rows,
                       float* sums, float* wide, const char* next) {
  const char* p = panel_at(w, panel);
  const int64_t k = w.inputs, bytes = bytes_an_input(w);
  const bool stream = rows <= WIDE_ROWS;
  const int64_t chunk = stream && W == 16 && w.kind != LMI_INT8 ? k
                        : x.narrow                             ? 4 * CHUNK_INPUTS
                                                               : CHUNK_INPUTS;
  for (int64_t done = 0; done < k; done += chunk) {
    const int64_t n = std::min(chunk, k - done);
    const char* here = p + done * bytes;
    const char* ahead = stream ? here + STREAM_AHEAD : done + n < k ? here + n * bytes : next;
    if (w.kind == LMI_F32) {
      product<Floats>(rows, PANEL, x.wide(first) + done, x.stride, here, PANEL, n, sums, PANEL,
                      done > 0, ahead);
    } else if (w.kind == LMI_INT8) {
      widen_bytes(here, n, wide);
      product<Floats>(rows, PANEL, x.wide(first) + done, x.stride, (const char*)wide, PANEL, n, sums,
                      PANEL, done > 0, ahead);
    } else if (!x.narrow) {
      product<Pairs>(rows, PANEL, x.wide(first) + done, x.stride, here, PANEL, n, sums, PANEL,
                     done > 0, ahead);
    } else {
#if LMI_DOT
      product<DotPairs>(rows, PANEL, x.halves(first) + done, x.stride, here, PANEL, n, sums, PANEL,
                        done > 0, ahead);
#endif
    }
  }
}

// Calls each(piece, me) for every piece below `count`; `me` is the calling thread's number
template <class Each>
LMI_INLINE void for_each(Team& team, int64_t count, Each each) {
  team.run(
      count,
      [](const void* data, int64_t piece, int64_t me) { (*(const Each*)data)(piece, me); }, &each);
}

// Calls each(row) for every row, with `a_piece` rows per piece
template <class Each>
LMI_INLINE void for_rows(Team& team, int64_t rows, int64_t a_piece, Each each) {
  for_each(team, (rows + a_piece - 1) / a_piece, [&](int64_t piece, int64_t) {
    const int64_t end = std::min(rows, (piece + 1) * a_piece);
    for (int64_t row = piece * a_piece; row < end; row++) each(row);
  });
}

// Calls finish(row, panel, sums of the panel) for every row and panel of x W^T
template <class Finish>
LMI_INLINE void linear(Engine& e, const LmiLinear& w, const Rows& x, int64_t rows, Finish finish) {
  const int64_t width = panels(w), chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
  const int64_t size = e.team->size();
  for_each(*e.team, width * chunks, [&](int64_t piece, int64_t me) {
    const Scratch& s = e.scratch[me];
    const int64_t chunk = piece / width, panel = piece % width;
    const int64_t first = rows * chunk / chunks, count = rows * (chunk + 1) / chunks - first;
    const int64_t next = std::min(piece + size, width * chunks - 1) % width;
    panel_sums(w, panel, x, first, count, s.sums, s.wide, panel_at(w, next));
    for (int64_t r = 0; r < count; r++) {
      float* sums = s.sums + r * PANEL;
      for (int64_t c = 0; c < PANEL; c += W) {
        Vector v = load(sums + c);
        if (w.scale) v = v * load(w.scale + panel * PANEL + c);
        if (w.bias) v = v + load(w.bias + panel * PANEL + c);
        store(sums + c, v);
      }
      finish(first + r, panel, (const float*)sums);
    }
  });
}

// Between the linear layers

static void normalise(const float* x, const float* weight, float eps, int64_t n, const Rows& to,
                      int64_t row) {
  Vector squares{};
  for (int64_t i = 0; i < n; i += W) squares += load(x + i) * load(x + i);
  const float factor = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
  for (int64_t i = 0; i < n; i += W) to.put(row, i, load(x + i) * factor * load(weight + i));
}

static void embed(Engine& e, int64_t row) {
  const LmiModel& m = e.model;
  const int64_t at = int64_t(e.step->token_ids[row]) * m.hidden;
  float* x = e.x + row * e.x_stride;
  if (m.embedding_kind == LMI_F32) {
    memcpy(x, (const float*)m.embedding + at, m.hidden * 4);
  } else {
    const bf16* from = (const bf16*)m.embedding + at;
    for (int64_t i = 0; i < m.hidden; i++) x[i] = widened(from[i]);
  }
  if (m.embedding_scale != 1)
    for (int64_t i = 0; i < m.hidden; i++) x[i] *= m.embedding_scale;
}

// cap * tanh(x / cap)
LMI_INLINE Vector capped(Vector x, float cap) {
  return cap - 2 * cap / (exponential(x * (2 / cap)) + 1.0f);
}

// Cosines, then sines, of one row, for layers of one kind
static void turns(Engine& e, int64_t row, const float* frequencies, float* to) {
  const LmiModel& m = e.model;
  const int64_t half = m.head_dim / 2;
  const LmiSequence& sequence = e.step->sequence[e.sequence[row]];
  const float length = float(sequence.first_position + sequence.rows);
  float slower = 1.0f;
  const bool scaled = frequencies == m.frequencies;  // layers with a window of their own are not
  int64_t turned = half;  // the features after these stay
  while (turned && !(frequencies[turned - 1] > 0)) turned--;
  if (scaled && m.growth_factor > 0 && length > m.trained_length)
    slower = powf(m.growth_factor * (length / m.trained_length) - (m.growth_factor - 1.0f),
                  m.growth_power);
  for (int64_t i = 0; i < half; i++) {
    float frequency = frequencies[i];
    if (slower != 1.0f) frequency /= powf(slower, float(i) / float(turned));
    const float angle = float(e.position[row]) * frequency;
    const float length = scaled && frequencies[i] > 0 ? m.amplitude : 1;  // 0: a feature that stays
    to[i] = cosf(angle) * length;
    to[half + i] = sinf(angle) * length;
  }
}

static void turn_head(float* x, const float* turn, int64_t half, float scale) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i], cosine = turn[i], sine = turn[half + i];
    x[i] = (a * cosine - b * sine) * scale;
    x[half + i] = (b * cosine + a * sine) * scale;
  }
}

// Store one token's values beside its neighbour's, which another thread may be writing
static void put_halves(uint32_t* pairs, const float* v, int64_t d, int64_t which) {
#if LMI_WIDTH == 16
  for (int64_t i = 0; i < d; i += W) {
    const Bits halves = halves_of(load(v + i)) << (16 * uint32_t(which));
    _mm512_mask_storeu_epi16(pairs + i, which ? 0xaaaaaaaau : 0x55555555u, (__m512i)halves);
  }
#else
  for (int64_t i = 0; i < d; i++) ((bf16*)(pairs + i))[which] = rounded(v[i]);
#endif
}

// Store a key as pairs of bfloat16
static void put_pairs(uint32_t* to, int64_t stride, const float* v, int64_t d) {
  for (int64_t i = 0; i < d; i += W) {
    const Longs halves = (Longs)halves_of(load(v + i));
    const Longs pairs = halves | halves >> 16;  // in the lower half of each
    for (int64_t j = 0; j < W / 2; j++) to[(i / 2 + j) * stride] = uint32_t(pairs[j]);
  }
}

// Rotate one row's queries and keys; store its keys and values in the cache
static void keep(Engine& e, const LmiLayer& layer, int64_t row) {
  const LmiModel& m = e.model;
  const int64_t d = m.head_dim, block = m.block_size, position = e.position[row];
  const LmiSequence& sequence = e.step->sequence[e.sequence[row]];
  const int64_t page = e.step->tables[sequence.first_block + position / block];
  const int64_t at = position % block, together = m.cache_kind == LMI_F32 ? 1 : 2;
  const bool near = layer.window && m.window_frequencies;
  const float* turn = e.turn + (near * e.step->rows + row) * d;
  float* qkv = e.qkv + row * e.qkv_stride;
  auto key_at = [&](int64_t h) {  // 4 bytes in each of many rows: one number, or a pair
    return (uint32_t*)layer.keys + (page * m.kv_heads + h) * block * d / together + at;
  };
  auto value_at = [&](int64_t h) {
    return (uint32_t*)layer.values + (page * m.kv_heads + h) * block * d / together +
           at / together * d;
  };
  for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
    if (h < m.kv_heads) {  // each row of a key is a line to wait for
      for (int64_t i = 0; i < d / together; i++) __builtin_prefetch(key_at(h) + i * block, 1, 3);
      for (int64_t i = 0; i < d; i += 16) __builtin_prefetch(value_at(h) + i, 1, 3);
    }
    float* x = qkv + h * d;
    const float* norm = h < m.heads ? layer.query_norm : layer.key_norm;
    if (norm) normalise(x, norm, m.norm_eps, d, Rows{(char*)x, 0, false}, 0);
    turn_head(x, turn, d / 2, h < m.heads ? m.scale : 1.0f);
  }
  for (int64_t h = 0; h < m.kv_heads; h++) {
    const float* k = qkv + (m.heads + h) * d;
    const float* v = k + m.kv_heads * d;
    if (m.cache_kind == LMI_F32) {
      float* keys = (float*)key_at(h);
      for (int64_t i = 0; i < d; i++) keys[i * block] = k[i];
      memcpy(value_at(h), v, d * 4);
    } else {
      put_pairs(key_at(h), block, k, d);
      put_halves(value_at(h), v, d, at % 2);
    }
  }
}

// Scores to weights for tokens base .. base + columns; rescales out and total to the new top. The row
// sees tokens `sees` .. `end`.
static void soften(float* scores, int64_t columns, int64_t base, int64_t sees, int64_t end,
                   float* out, int64_t d, float* top, float* total) {
  const float nothing = -INFINITY;
  for (int64_t t = 0; t < std::min(columns, sees - base); t++) scores[t] = nothing;
  for (int64_t t = std::max<int64_t>(0, end - base); t < columns; t++) scores[t] = nothing;
  Vector most = all(nothing);
  for (int64_t t = 0; t < columns; t += W) most = highest(most, load(scores + t));
  const float reached = std::max(*top, highest(most));
  if (reached == nothing) {
    memset(scores, 0, columns * 4);
    return;
  }
  Vector sums{};
  for (int64_t t = 0; t < columns; t += W) {
    Vector weight = exponential(load(scores + t) - reached);
    sums += weight;
    store(scores + t, weight);
  }
  if (reached != *top) {
    const float correction = exponential(all(*top - reached))[0];
    *total *= correction;
    for (int64_t i = 0; i < d; i += W) store(out + i, load(out + i) * correction);
    *top = reached;
  }
  *total += sum(sums);
}

// Cache pages of one span of a sequence, for the KV heads of one piece
struct Pages {
  const LmiLayer& layer;
  const int32_t* table;  // of the span's first page
  int64_t count, kv_heads, first_head, heads, block, d, columns;
  int64_t bytes;  // of a page of one head

  int64_t start(int64_t page, int64_t head) const {
    return (table[page] * kv_heads + first_head + head) * bytes;
  }
  int64_t columns_of(int64_t page) const { return std::min(block, columns - page * block); }
};

// Calls each(page, head, its bytes, bytes to prefetch); after the last page, prefetches in `then`
template <class Each>
LMI_INLINE void for_pages(const Pages& pages, const void* from, const void* then, Each each) {
  const int64_t count = pages.count * pages.heads;
  auto at = [&](int64_t i) { return pages.start(i / pages.heads, i % pages.heads); };
  for (int64_t i = 0; i < count; i++) {
    const int64_t next = i + PAGES_AHEAD;
    const char* ahead = next < count ? (const char*)from + at(next)
                                     : (const char*)then + at(std::min(next, 2 * count - 1) - count);
    each(i / pages.heads, i % pages.heads, (const char*)from + at(i), ahead);
  }
}

// Several rows of heads read each page together

template <class Cache>
static void score_pages(const Pages& pages, int64_t lines, const Scratch& s) {
  const void* values = pages.layer.values;
  for_pages(pages, pages.layer.keys, values, [&](int64_t page, int64_t head, auto keys, auto ahead) {
    const int64_t columns = pages.columns_of(page), line = head * lines;
    const float* queries = s.queries + line * pages.d;
    float* scores = s.scores + line * s.span + page * pages.block;
    if (columns == NARROW * W)
      tiles<Cache, 1, TALL_ROWS, NARROW, 1>(lines, columns, queries, pages.d, keys, pages.block,
                                            pages.d, scores, s.span, false, ahead, 64, 1);
    else
      product<Cache>(lines, columns, queries, pages.d, keys, pages.block, pages.d, scores, s.span,
                     false, ahead);
  });
}

template <class Cache>
static void gather_pages(const Pages& pages, int64_t lines, const Scratch& s) {
  const void* values = pages.layer.values;
  for_pages(pages, values, values, [&](int64_t page, int64_t head, auto here, auto ahead) {
    const int64_t line = head * lines;
    product<Cache>(lines, pages.d, s.scores + line * s.span + page * pages.block, s.span, here,
                   pages.d, pages.columns_of(page), s.out + line * pages.d, pages.d, true, ahead);
  });
}

// A single row over its cache. A score is one long dependency chain, so several groups of 16 tokens
// are computed in parallel, and sums of values stay in registers from page to page. Each sum has the
// same terms in the same order as above.

// Scores of COUNT sixteens, while prefetching those at `ahead`
template <class Cache, int COUNT>
LMI_INLINE void score_sixteens(const float* query, const char* keys, const Sixteen* at, int64_t d,
                               int64_t row_bytes, float* scores, const char* const* ahead) {
  Vector sums[COUNT * NARROW]{};
  for (int64_t i = 0; i < d / Cache::STEP; i++)
#pragma GCC unroll 16
    for (int s = 0; s < COUNT; s++) {
      __builtin_prefetch(ahead[s] + i * row_bytes, 0, 2);
#pragma GCC unroll 16
      for (int c = 0; c < NARROW; c++) {
        Vector column[Cache::STEP];
        Cache::widen(keys + at[s].key + i * row_bytes + c * W * 4, column);
#pragma GCC unroll 16
        for (int j = 0; j < Cache::STEP; j++)
          sums[s * NARROW + c] += column[j] * query[i * Cache::STEP + j];
      }
    }
#pragma GCC unroll 16
  for (int c = 0; c < COUNT * NARROW; c++) store(scores + c * W, sums[c]);
}

// Adds to C vectors of `out` the weighted values of `count` sixteens
template <class Cache, int C>
LMI_INLINE void gather_sixteens(const float* weights, const char* values, const Sixteen* at,
                                int64_t count, const Sixteen* last, int64_t d, float* out) {
  Vector sums[1][C];
  begin(sums, out, 0, true);
  for (int64_t s = 0; s < count; s++) {
    const char* here = values + at[s].value;
    const char* ahead = values + std::min(at + s + PAGES_AHEAD, last)->value;
    for (int64_t i = 0; i < 16 / Cache::STEP; i++)
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) {
        if (c * W % 16 == 0) __builtin_prefetch(ahead + (i * d + c * W) * 4, 0, 2);
        Vector column[Cache::STEP];
        Cache::widen(here + (i * d + c * W) * 4, column);
#pragma GCC unroll 16
        for (int j = 0; j < Cache::STEP; j++)
          sums[0][c] += column[j] * weights[s * 16 + i * Cache::STEP + j];
      }
  }
  end(sums, out, 0);
}

// Finds the sixteens of all heads, head by head; returns their number per head
template <class Cache>
static int64_t find_sixteens(const Pages& pages, Sixteen* at) {
  const int64_t count = pages.columns / 16;
  for (int64_t head = 0; head < pages.heads; head++)
    for (int64_t t = 0; t < count; t++) {
      const int64_t start = pages.start(t * 16 / pages.block, head), in_page = t * 16 % pages.block;
      at[head * count + t] = {start + in_page * 4, start + in_page / Cache::STEP * pages.d * 4};
    }
  return count;
}

template <class Cache>
static void score_alone(const Pages& pages, int64_t count, const Scratch& s) {
  const char *keys = (const char*)pages.layer.keys, *values = (const char*)pages.layer.values;
  const int64_t all = pages.heads * count;
  auto some = [&](auto number, int64_t head, int64_t first) {
    constexpr int COUNT = decltype(number)::value;
    const char* ahead[COUNT];
    for (int i = 0; i < COUNT; i++) {
      const int64_t next = head * count + first + COUNT + i;
      ahead[i] = next < all ? keys + s.at[next].key
                            : values + s.at[std::min(next - all, all - 1)].value;
    }
    score_sixteens<Cache, COUNT>(s.queries + head * pages.d, keys, s.at + head * count + first,
                                 pages.d, pages.block * 4, s.scores + head * s.span + first * 16,
                                 ahead);
  };
  for (int64_t head = 0; head < pages.heads; head++) {
    int64_t first = 0;
    for (; first + SIDE_BY_SIDE <= count; first += SIDE_BY_SIDE)
      some(std::integral_constant<int, SIDE_BY_SIDE>(), head, first);
    for (; first < count; first++) some(std::integral_constant<int, 1>(), head, first);
  }
}

template <class Cache>
static void gather_alone(const Pages& pages, int64_t count, const Scratch& s) {
  const Sixteen* last = s.at + pages.heads * count - 1;
  for (int64_t head = 0; head < pages.heads; head++) {
    int64_t c = 0;
    auto some = [&](auto vectors) {
      constexpr int C = decltype(vectors)::value;
      for (; c + C * W <= pages.d; c += C * W)
        gather_sixteens<Cache, C>(s.scores + head * s.span, (const char*)pages.layer.values + c * 4,
                                  s.at + head * count, count, last, pages.d,
                                  s.out + head * pages.d + c);
    };
    some(std::integral_constant<int, 8>());
    some(std::integral_constant<int, 4>());
    some(std::integral_constant<int, 1>());
  }
}

// Attention of some rows of one sequence, for the query heads of some KV heads
template <class Cache>
static void attend(Engine& e, const LmiLayer& layer, const Queries& rows, const Scratch& s,
                   const Rows& to) {
  const LmiModel& m = e.model;
  const int64_t d = m.head_dim, block = m.block_size, group = m.heads / m.kv_heads;
  const int64_t lines = rows.count * group;
  const LmiSequence& sequence = e.step->sequence[rows.sequence];
  const int64_t first_row = sequence.first_row + rows.first;
  const int64_t first = sequence.first_position + rows.first, end = first + rows.count;
  auto sees = [&](int64_t position) {
    return layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
  };
  // calls each(line, its row, offset of its query or result in a row)
  auto for_lines = [&](auto each) {
    for (int64_t head = 0; head < rows.heads; head++)
      for (int64_t g = 0; g < lines; g++)
        each(head * lines + g, g / group, ((rows.first_head + head) * group + g % group) * d);
  };
  for_lines([&](int64_t line, int64_t row, int64_t column) {
    memcpy(s.queries + line * d, e.qkv + (first_row + row) * e.qkv_stride + column, d * 4);
    s.top[line] = -INFINITY;
    s.total[line] = 0;
  });
  memset(s.out, 0, rows.heads * lines * d * 4);
  for (int64_t from = sees(first) / s.span * s.span; from < end; from += s.span) {
    const int64_t page = std::max(from, sees(first)) / block, stop = std::min(from + s.span, end);
    const int64_t base = page * block, columns = (stop - base + 15) / 16 * 16;
    const Pages pages{layer,
                      e.step->tables + sequence.first_block + page,
                      (stop - base + block - 1) / block,
                      m.kv_heads,
                      rows.first_head,
                      rows.heads,
                      block,
                      d,
                      columns,
                      block * d * (4 / Cache::STEP)};
    const int64_t alone = lines == 1 ? find_sixteens<Cache>(pages, s.at) : 0;
    alone ? score_alone<Cache>(pages, alone, s) : score_pages<Cache>(pages, lines, s);
    for_lines([&](int64_t line, int64_t row, int64_t) {
      float* scores = s.scores + line * s.span;
      for (int64_t t = 0; m.score_cap > 0 && t < columns; t += W)
        store(scores + t, capped(load(scores + t), m.score_cap));
      soften(scores, columns, base, sees(first + row), first + row + 1,
             s.out + line * d, d, s.top + line, s.total + line);
    });
    alone ? gather_alone<Cache>(pages, alone, s) : gather_pages<Cache>(pages, lines, s);
  }
  for_lines([&](int64_t line, int64_t row, int64_t column) {
    for (int64_t i = 0; i < d; i += W)
      to.put(first_row + row, column + i, load(s.out + line * d + i) / s.total[line]);
  });
}

// The highest of a panel's columns below `vocab`, the first one if equal
static void likeliest_of(Engine& e, int64_t row, int64_t panel, const float* sums) {
  const int64_t first = panel * PANEL, count = std::min(PANEL, e.model.vocab - first);
  int64_t best = 0;
  if (count == PANEL) {  // per lane: single comparisons would be one long dependency chain
    Vector most = load(sums);
    Integers at{};
    for (int64_t c = W; c < PANEL; c += W) {
      const Vector next = load(sums + c);
      at = next > most ? Integers{} + int32_t(c) : at;
      most = highest(next, most);
    }
    const float top = highest(most);
    int64_t least = PANEL;
    for (int i = 0; i < W; i++)
      if (most[i] == top) least = std::min<int64_t>(least, at[i] + i);
    best = least % PANEL;  // if all are NaN, the first
  } else {
    for (int64_t c = 1; c < count; c++)
      if (sums[c] > sums[best]) best = c;
  }
  const int64_t to = row * panels(e.model.head) + panel;
  e.best[to] = sums[best];
  e.best_id[to] = int32_t(first + best);
}

void step(Engine& e) {
  const LmiModel& m = e.model;
  const LmiStep& now = *e.step;
  Team& team = *e.team;
  const Rows h{e.h, e.h_stride, e.narrow_rows}, inner{e.inner, e.inner_stride, e.narrow_rows};
  Rows attended{e.attended, e.attended_stride, e.narrow_rows};
  int64_t rows = now.rows;
  float* x = e.x;
  // a prompt's tokens share cache lines, which two threads should not write alternately
  const int64_t kept_together =
      std::max<int64_t>(1, std::min<int64_t>(KEPT_TOGETHER, rows / (2 * team.size())));
  auto norm = [&](const float* weight) {
    for_rows(team, rows, ROWS_A_PIECE, [&](int64_t row) {
      normalise(x + row * e.x_stride, weight, m.norm_eps, m.hidden, h, row);
    });
  };
  auto add_to_x = [&](int64_t row, int64_t panel, const float* sums) {
    float* to = x + row * e.x_stride + panel * PANEL;
    for (int64_t c = 0; c < PANEL; c += W) store(to + c, load(to + c) + load(sums + c));
  };
  // x += linear(from), or x += norm(linear(from))
  auto add_linear = [&](const LmiLinear& w, const Rows& from, const float* weight) {
    if (!weight) return linear(e, w, from, rows, add_to_x);
    linear(e, w, from, rows, [&](int64_t row, int64_t panel, const float* sums) {
      memcpy(e.added + row * e.x_stride + panel * PANEL, sums, PANEL * 4);
    });
    for_rows(team, rows, ROWS_A_PIECE, [&](int64_t row) {
      float *to = x + row * e.x_stride, *added = e.added + row * e.x_stride;
      normalise(added, weight, m.norm_eps, m.hidden, Rows{(char*)added, 0, false}, 0);
      for (int64_t i = 0; i < m.hidden; i += W) store(to + i, load(to + i) + load(added + i));
    });
  };
  for_rows(team, rows, ROWS_A_PIECE, [&](int64_t row) {
    embed(e, row);
    turns(e, row, m.frequencies, e.turn + row * m.head_dim);
    if (m.window_frequencies)
      turns(e, row, m.window_frequencies, e.turn + (now.rows + row) * m.head_dim);
  });
  for (int64_t index = 0; index < m.layers; index++) {
    const LmiLayer& layer = e.layers[index];
    norm(layer.attention_norm);
    linear(e, layer.qkv, h, rows, [&](int64_t row, int64_t panel, const float* sums) {
      memcpy(e.qkv + row * e.qkv_stride + panel * PANEL, sums, PANEL * 4);
    });
    for_rows(team, rows, kept_together, [&](int64_t row) { keep(e, layer, row); });
    for_each(team, int64_t(e.queries.size()), [&](int64_t piece, int64_t me) {
      if (m.cache_kind == LMI_F32)
        attend<Floats>(e, layer, e.queries[piece], e.scratch[me], attended);
      else
        attend<Pairs>(e, layer, e.queries[piece], e.scratch[me], attended);
    });
    if (index == m.layers - 1) {  // from here on a row feeds only its own logits
      const int64_t bytes = m.heads * m.head_dim * (e.narrow_rows ? 2 : 4);
      const int64_t stride = e.attended_stride * (e.narrow_rows ? 2 : 4);
      for_rows(team, now.sampled, ROWS_A_PIECE, [&](int64_t i) {
        const int64_t row = now.sampled_rows[i];
        memcpy(e.last_x + i * e.x_stride, x + row * e.x_stride, m.hidden * 4);
        memcpy(e.last_attended + i * stride, e.attended + row * stride, bytes);
      });
      x = e.last_x;
      attended.data = e.last_attended;
      rows = now.sampled;
    }
    add_linear(layer.out, attended, layer.attention_out_norm);
    norm(layer.mlp_norm);
    linear(e, layer.gate_up, h, rows, [&](int64_t row, int64_t panel, const float* sums) {
      for (int64_t c = 0; c < PANEL / 2; c += W) {
        const Vector gate = load(sums + c), up = load(sums + PANEL / 2 + c);
        // gelu(x) is about x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
        const Vector at = m.gelu ? (gate + gate * gate * gate * 0.044715f) * 1.5957691216f : gate;
        inner.put(row, panel * (PANEL / 2) + c, gate / (exponential(-at) + 1.0f) * up);
      }
    });
    add_linear(layer.down, inner, layer.mlp_out_norm);
  }
  norm(m.final_norm);
  linear(e, m.head, h, rows, [&](int64_t row, int64_t panel, const float* sums) {
    const int64_t count = std::min(PANEL, m.vocab - panel * PANEL);
    float* to = now.logits + row * m.vocab + panel * PANEL;
    if (now.logits) memcpy(to, sums, count * 4);
    for (int64_t c = 0; now.logits && m.logit_cap > 0 && c < count; c++)
      to[c] = tanhf(to[c] / m.logit_cap) * m.logit_cap;
    if (now.likeliest) likeliest_of(e, row, panel, sums);
  });
  if (!now.likeliest) return;
  for_rows(team, rows, ROWS_A_PIECE, [&](int64_t row) {
    const int64_t width = panels(m.head);
    const float* best = e.best + row * width;
    int64_t top = 0;
    for (int64_t p = 1; p < width; p++)
      if (best[p] > best[top]) top = p;
    now.likeliest[row] = e.best_id[row * width + top];
  });
}

}  // namespace LMI_NAME
}  // namespace lmi

#undef LMI_INLINE
#undef LMI_NAME
#undef LMI_WIDTH
#undef LMI_DOT
#endif
