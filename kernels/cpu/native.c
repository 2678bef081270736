/* The decoder's operations for CPU: paged attention, the write of keys and values, norms,
 * activation and linear layers, for bfloat16 and float32 data. Python calls them with addresses
 * (see native.py); nothing of Python, torch or a thread library is linked.
 *
 * One idea carries the file. Whatever is the right-hand side of a product (keys, values, weights)
 * is stored as rows of 16 lanes times 4 bytes, one row per *unit* of the dimension that is summed
 * over: a unit is one float32, or two neighbouring bfloat16. The left-hand side then gives 4 bytes
 * per unit, which are broadcast. So scores, weighted values and linear layers of both data types
 * are one loop, `accumulate`, and on processors with AVX512-BF16 its body is one instruction.
 *
 * The file includes itself once per instruction set ("level"); the best one is chosen when the
 * library is loaded, and tests may choose a lower one. Compile with -ffp-contract=off: sums of
 * products are fused where that is written (`fused`), and nowhere else, so that the rounding of
 * RoPE is that of separate operations, as in Hugging Face's models.
 */
#ifndef LEVEL

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
    LANES = 16,        /* floats of a vector, whatever the processor's registers hold */
    TILE = 16,         /* tokens of a tile of keys and values */
    CHUNK = 4,         /* tiles between two updates of the running softmax */
    SPAN = CHUNK * TILE,
    ROWS = 48,         /* queries times heads that share the keys they read, at most */
    HEAD_DIM = 256,    /* largest head */
    SPLIT = 32,        /* tiles that one thread reads for few queries, at most. Fixed, so that a
                          sequence's result does not depend on its batch or on the threads */
    PANEL = 3,         /* vectors of outputs of a linear layer computed together */
};

/* Vectors are passed between inlined functions only, so their calling convention is moot. */
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
/* The same in memory: at any address, aliasing anything. */
typedef floats floats_in __attribute__((aligned(1), may_alias));
typedef words words_in __attribute__((aligned(1), may_alias));
typedef halves halves_in __attribute__((aligned(1), may_alias));
typedef uint32_t word_in __attribute__((aligned(1), may_alias));

typedef void task(void *);

/* How to run: `fork` is OpenMP's GOMP_parallel of the pool that torch uses too, so that there is
 * one pool of threads; NULL runs on the calling thread alone. */
struct machine {
    void (*fork)(task *, void *, unsigned, unsigned);
    int32_t level;
};

/* ---- Jobs: what the threads of one call share ---- */

/* Items of a job: handed out, finished, all. Whoever waits for a job waits for its items and not
 * for its threads: one that the system has put to sleep between two items holds nobody up. */
struct work {
    int64_t next, done, total;
};

struct tile {
    int32_t index;    /* of head 0, in tiles of the pool */
    int32_t position; /* of its first token in the sequence */
    int32_t count;    /* tokens in it; what follows them was never written */
};

/* Queries of one sequence and the tiles that they read. */
struct item {
    int32_t query, num_queries; /* first row in the step */
    int32_t position;           /* of the first query */
    int32_t tile, num_tiles;
    int32_t group, num_splits;  /* sequences whose tiles several items share; -1 if one does all */
    int32_t partial, partials;  /* rows of the partial results: this item's, the group's first */
};

struct attention {
    struct work work; /* items of all KV heads */
    const struct tile *tiles;
    const struct item *items;
    int32_t num_heads, num_kv_heads, head_dim, tiles_per_block;
    float scale;
    int32_t window;
    char *partial;       /* per row: head_dim sums, largest score, sum of weights */
    int32_t *unfinished; /* per group and KV head: items to come; between runs, all */
    const char *query;
    int64_t query_stride; /* elements between tokens */
    char *output;
    const char *pool;
};

struct rope {
    struct work work; /* tokens */
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    const char *qkv, *cos, *sin, *q_norm, *k_norm;
    int64_t angle_stride; /* elements between tokens of cos and sin */
    const int64_t *slots;
    float eps;
    char *query, *pool;
};

struct norm {
    struct work work; /* rows */
    int64_t size;
    const char *x, *delta, *weight;
    char *sum, *output;
    float eps;
};

struct activation {
    struct work work; /* rows */
    int64_t size;
    const char *gate_up;
    char *output;
};

struct linear {
    struct work work; /* panels */
    int64_t num_rows, in_features, out_features, x_stride;
    const char *x, *weight, *bias;
    char *output;
    int32_t float_output;
};

/* A decoder layer: weights packed, biases and qk-norms NULL where the model has none. */
struct layer {
    const void *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias;
    const void *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    void *pool;
    int64_t window;
};

/* A step of a decoder, and room for what its layers hand on. */
struct step {
    int64_t num_tokens, hidden_size, inner_size, block_size, angle_stride;
    float eps;
    const int64_t *slots;
    const void *cos, *sin, *norm;
    void *hidden, *delta, *normed, *joined, *query, *inner;
};

struct kernels {
    task *attention[2], *rope[2], *norm[2], *activation[2], *linear[2]; /* float32, bfloat16 */
};

/* The next `count` items, or what is left of them. */
INLINE int64_t take(struct work *w, int64_t count) {
    return __atomic_fetch_add(&w->next, count, __ATOMIC_RELAXED);
}

INLINE void finish(struct work *w, int64_t count) {
    __atomic_fetch_add(&w->done, count, __ATOMIC_RELEASE);
}

INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static const ints lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* ---- The layout of the pool ----
 * A block of a KV head is a run of tiles of 16 tokens; a tile is its keys, then its values:
 *     keys    [units of the head][16 tokens]            a unit: 1 float32, 2 bfloat16
 *     values  [units of 16 tokens][head, padded to 16]
 * So a tile is one run of memory, and both products read rows of whole vectors. */

INLINE int key_units(int head_dim, int bf16) { return bf16 ? head_dim / 2 : head_dim; }
INLINE int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }
INLINE int64_t key_bytes(int head_dim, int bf16) { return 64 * (int64_t)key_units(head_dim, bf16); }
INLINE int64_t tile_bytes(int head_dim, int bf16) {
    return key_bytes(head_dim, bf16) + TILE * (int64_t)padded(head_dim) * (bf16 ? 2 : 4);
}

/* ---- The levels ---- */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define OP(name) JOIN(name, LEVEL_NAME)

#define LEVEL 0
#define LEVEL_NAME generic
#include "native.c"

#if defined(__x86_64__)
#define LEVEL 1
#define LEVEL_NAME avx2
#include "native.c"

#define LEVEL 2
#define LEVEL_NAME avx512
#include "native.c"

#define LEVEL 3
#define LEVEL_NAME avx512_bf16
#include "native.c"
#endif

static const struct kernels *const levels[] = {
    &kernels_generic,
#if defined(__x86_64__)
    &kernels_avx2,
    &kernels_avx512,
    &kernels_avx512_bf16,
#endif
};

/* ---- What Python calls ---- */

/* The best level of this processor. */
EXPORT int32_t best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
    return 0;
#endif
}

static void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void yield_processor(void) {
#if defined(__unix__) || defined(__APPLE__)
    sched_yield();
#endif
}

/* Run a task on at most `threads` threads, of which no more are woken than there are items. */
static void run(const struct machine *m, task *f, void *job, int64_t threads, int64_t items) {
    threads = MIN(threads, items);
    if (threads > 1 && m->fork)
        m->fork(f, job, (unsigned)threads, 0);
    else
        f(job);
}

/* Tiles and items of a step. `tiles` holds at least 16-token pieces of all blocks, `items` at
 * least num_tokens + num_sequences + num_tiles / SPLIT, `unfinished` a number per sequence and KV
 * head. `counts`: items, partial rows. */
EXPORT void plan_attention(int64_t num_sequences, int64_t max_blocks, int64_t block_size,
                           int64_t num_kv_heads, int64_t grouped, const int64_t *query_starts,
                           const int64_t *seq_lens, const int64_t *block_tables,
                           const int64_t *block_starts, struct tile *tiles, struct item *items,
                           int32_t *unfinished, int64_t *counts) {
    const int32_t tiles_per_block = (int32_t)((block_size + TILE - 1) / TILE);
    const int32_t queries_per_item = (int32_t)MAX(1, ROWS / grouped);
    int32_t num_tiles = 0, num_items = 0, num_groups = 0, partial = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
        const int64_t *table = block_tables + s * max_blocks;
        const int64_t *start = block_starts + s * (max_blocks + 1);
        const int32_t first = num_tiles;
        for (int64_t b = 0; b < max_blocks && start[b] < seq_lens[s]; b++) {
            const int64_t filled = MIN(start[b + 1], seq_lens[s]) - start[b];
            for (int32_t t = 0; t * TILE < filled; t++)
                tiles[num_tiles++] = (struct tile){
                    .index = (int32_t)(table[b] * num_kv_heads * tiles_per_block + t),
                    .position = (int32_t)(start[b] + t * TILE),
                    .count = (int32_t)MIN(TILE, filled - t * TILE),
                };
        }
        const int32_t num_queries = (int32_t)(query_starts[s + 1] - query_starts[s]);
        const int32_t offset = (int32_t)seq_lens[s] - num_queries;
        /* The last queries read most, so they come first: the threads then end together. */
        int32_t end = num_tiles;
        for (int32_t q = (num_queries - 1) / queries_per_item * queries_per_item; q >= 0;
             q -= queries_per_item) {
            const int32_t count = MIN(queries_per_item, num_queries - q);
            while (tiles[end - 1].position > offset + q + count - 1) end--;
            struct item item = {
                .query = (int32_t)query_starts[s] + q,
                .num_queries = count,
                .position = offset + q,
                .group = -1,
                .num_splits = 1,
            };
            const int32_t all = end - first;
            if (num_queries <= queries_per_item && all > SPLIT) {
                item.group = num_groups++;
                item.num_splits = (all + SPLIT - 1) / SPLIT;
                for (int64_t h = 0; h < num_kv_heads; h++) *unfinished++ = item.num_splits;
                item.partials = partial;
            }
            for (int32_t i = 0; i < item.num_splits; i++) {
                item.tile = first + (int32_t)((int64_t)all * i / item.num_splits);
                item.num_tiles =
                    first + (int32_t)((int64_t)all * (i + 1) / item.num_splits) - item.tile;
                item.partial = partial;
                if (item.group >= 0) partial += count * (int32_t)grouped;
                items[num_items++] = item;
            }
        }
    }
    counts[0] = num_items;
    counts[1] = partial;
}

EXPORT void attend(const struct machine *m, int64_t threads, int32_t bf16, struct attention *job) {
    job->work.next = job->work.done = 0;
    run(m, levels[m->level]->attention[bf16], job, threads, job->work.total);
}

EXPORT void rope_and_store(const struct machine *m, int64_t threads, int32_t bf16,
                           int64_t num_tokens, int32_t num_heads, int32_t num_kv_heads,
                           int32_t head_dim, int32_t block_size, const void *qkv, const void *cos,
                           const void *sin, int64_t angle_stride, const void *q_norm,
                           const void *k_norm, float eps, const int64_t *slots, void *query,
                           void *pool) {
    struct rope job = {{0, 0, num_tokens}, num_heads, num_kv_heads, head_dim, block_size,
                       qkv, cos, sin, q_norm, k_norm, angle_stride, slots, eps, query, pool};
    run(m, levels[m->level]->rope[bf16], &job, threads, num_tokens / 8);
}

/* output = norm(x) * weight; with `delta`, x + delta goes to `sum` (which may be x) first. */
EXPORT void rms_norm(const struct machine *m, int64_t threads, int32_t bf16, int64_t num_rows,
                     int64_t size, const void *x, const void *delta, const void *weight, float eps,
                     void *sum, void *output) {
    struct norm job = {{0, 0, num_rows}, size, x, delta, weight, sum, output, eps};
    run(m, levels[m->level]->norm[bf16], &job, threads, num_rows * size / 8192);
}

EXPORT void silu_and_mul(const struct machine *m, int64_t threads, int32_t bf16, int64_t num_rows,
                         int64_t size, const void *gate_up, void *output) {
    struct activation job = {{0, 0, num_rows}, size, gate_up, output};
    run(m, levels[m->level]->activation[bf16], &job, threads, num_rows * size / 8192);
}

static int64_t panels(int64_t out_features) {
    return (out_features + PANEL * LANES - 1) / (PANEL * LANES);
}

EXPORT void linear(const struct machine *m, int64_t threads, int32_t bf16, int64_t num_rows,
                   int64_t in_features, int64_t out_features, const void *x, int64_t x_stride,
                   const void *weight, const void *bias, void *output, int32_t float_output) {
    struct linear job = {{0, 0, panels(out_features)}, num_rows, in_features, out_features,
                         x_stride, x, weight, bias, output, float_output};
    run(m, levels[m->level]->linear[bf16], &job, threads, job.work.total);
}

/* ---- All layers in one call ---- */

struct phase {
    task *run;
    union {
        struct work work; /* the first member of each */
        struct attention attention;
        struct rope rope;
        struct norm norm;
        struct activation activation;
        struct linear linear;
    } job;
};

struct program {
    struct phase *phases;
    int64_t num_phases;
};

static void run_program(void *p) {
    const struct program *program = p;
    for (int64_t i = 0; i < program->num_phases; i++) {
        struct phase *phase = program->phases + i;
        phase->run(&phase->job);
        /* Others may still work on their last items. If that takes long, one of them lacks a
         * processor: offer ours. */
        for (int64_t spins = 0;
             __atomic_load_n(&phase->job.work.done, __ATOMIC_ACQUIRE) < phase->job.work.total;
             spins++) {
            if (spins < 4000)
                relax();
            else
                yield_processor();
        }
    }
}

/* Bytes that `forward` needs for its program. */
EXPORT int64_t program_bytes(int64_t num_layers) {
    return (9 * num_layers + 1) * (int64_t)sizeof(struct phase);
}

/* All layers and the last norm: `hidden` becomes `normed`. One call, so that whoever shares the
 * process with the caller can have the interpreter for a whole step, and one fork, since threads
 * that have to meet 300 times a step are slow wherever they do not have their processors to
 * themselves. */
EXPORT void forward(const struct machine *m, int64_t threads, int32_t bf16, const struct step *s,
                    const struct layer *layers, int64_t num_layers, const struct attention *a,
                    void *room) {
    const struct kernels *k = levels[m->level];
    const int64_t n = s->num_tokens, size = s->hidden_size, inner = s->inner_size;
    const int64_t q_size = (int64_t)a->num_heads * a->head_dim;
    const int64_t qkv_size = q_size + 2 * (int64_t)a->num_kv_heads * a->head_dim;
    struct phase *p = room;
#define PHASE(kind, ...) *p++ = (struct phase){k->kind[bf16], {.kind = {__VA_ARGS__}}}
#define LINEAR(in, out, x, weight, bias, output) \
    PHASE(linear, {0, 0, panels(out)}, n, in, out, in, x, weight, bias, output, 0)
#define NORM(delta, weight) \
    PHASE(norm, {0, 0, n}, size, s->hidden, delta, weight, s->hidden, s->normed, s->eps)
    for (int64_t i = 0; i < num_layers; i++) {
        const struct layer *l = layers + i;
        NORM(i ? s->delta : NULL, l->attention_norm);
        LINEAR(size, qkv_size, s->normed, l->qkv, l->qkv_bias, s->joined);
        PHASE(rope, {0, 0, n}, a->num_heads, a->num_kv_heads, a->head_dim, (int32_t)s->block_size,
              s->joined, s->cos, s->sin, l->q_norm, l->k_norm, s->angle_stride, s->slots, s->eps,
              s->query, l->pool);
        *p = (struct phase){k->attention[bf16], {.attention = *a}};
        p->job.attention.work.next = p->job.attention.work.done = 0;
        p->job.attention.query = s->query;
        p->job.attention.query_stride = q_size;
        p->job.attention.output = s->inner;
        p->job.attention.pool = l->pool;
        p++->job.attention.window = (int32_t)l->window;
        LINEAR(q_size, size, s->inner, l->output, l->output_bias, s->delta);
        NORM(s->delta, l->mlp_norm);
        LINEAR(size, 2 * inner, s->normed, l->gate_up, l->gate_up_bias, s->joined);
        PHASE(activation, {0, 0, n}, inner, s->joined, s->inner);
        LINEAR(inner, size, s->inner, l->down, l->down_bias, s->delta);
    }
    NORM(s->delta, s->norm);
#undef NORM
#undef LINEAR
#undef PHASE
    struct program program = {room, p - (struct phase *)room};
    run(m, run_program, &program, threads, threads);
}

/* Weights in the order in which `linear` reads them: [panel][unit][48 outputs], zeros past the
 * last output. `weight` is [out_features, in_features]. */
EXPORT void pack_weight(int32_t bf16, int64_t in_features, int64_t out_features, const void *weight,
                        void *packed) {
    const int64_t units = bf16 ? in_features / 2 : in_features, width = PANEL * LANES;
    const word_in *from = weight;
    word_in *to = packed;
    for (int64_t n = 0; n < out_features; n += width)
        for (int64_t u = 0; u < units; u++)
            for (int64_t i = 0; i < width; i++)
                *to++ = n + i < out_features ? from[(n + i) * units + u] : 0;
}

/* Rows of a packed weight in plain order: what an embedding that shares it looks up. */
EXPORT void unpack_rows(int32_t bf16, int64_t in_features, int64_t num_rows, const int64_t *rows,
                        const void *packed, void *output) {
    const int64_t units = bf16 ? in_features / 2 : in_features, width = PANEL * LANES;
    word_in *to = output;
    for (int64_t i = 0; i < num_rows; i++) {
        const word_in *from = packed;
        from += rows[i] / width * width * units + rows[i] % width;
        for (int64_t u = 0; u < units; u++) *to++ = from[u * width];
    }
}

/* Python's build tools want it of every extension module; this one is loaded by ctypes. */
EXPORT void *PyInit__native(void) { return NULL; }

#else /* LEVEL: the rest is compiled once per instruction set */

#if defined(__clang__)
#if LEVEL == 1
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#elif LEVEL == 2
#pragma clang attribute push( \
    __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#elif LEVEL == 3
#pragma clang attribute push( \
    __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
    apply_to = function)
#endif
#elif LEVEL >= 1
#pragma GCC push_options
#if LEVEL == 1
#pragma GCC target("avx2,fma")
#elif LEVEL == 2
#pragma GCC target("fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#else
#pragma GCC target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif
#endif

/* ---- Arithmetic on 16 lanes ---- */

/* Inlined functions that touch vectors belong to the level too: gcc breaks a vector up as the
 * function's own target demands, before it inlines. */

INLINE words OP(load_words)(const void *p) { return *(const words_in *)p; }
INLINE floats OP(load_floats)(const void *p) { return *(const floats_in *)p; }
INLINE void OP(store_floats)(void *p, floats v) { *(floats_in *)p = v; }

INLINE floats OP(splat)(float x) {
#if LEVEL >= 2
    return (floats)_mm512_set1_ps(x);
#else
    return (floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}

INLINE floats OP(choose)(ints mask, floats a, floats b) {
    return (floats)((mask & (ints)a) | (~mask & (ints)b));
}

INLINE floats OP(fused)(floats a, floats b, floats c) {
#if LEVEL >= 2
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LEVEL == 1 || defined(__aarch64__)
    floats r;
    for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

INLINE floats OP(larger)(floats a, floats b) {
#if LEVEL >= 2
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return OP(choose)(a > b, a, b);
#endif
}

INLINE float OP(largest)(floats v) {
#if LEVEL >= 2
    return _mm512_reduce_max_ps((__m512)v);
#else
    float r = v[0];
    for (int i = 1; i < LANES; i++) r = v[i] > r ? v[i] : r;
    return r;
#endif
}

INLINE float OP(sum)(floats v) {
#if LEVEL >= 2
    return _mm512_reduce_add_ps((__m512)v);
#else
    float half[8];
    for (int i = 0; i < 8; i++) half[i] = v[i] + v[i + 8];
    for (int n = 4; n; n /= 2)
        for (int i = 0; i < n; i++) half[i] += half[i + n];
    return half[0];
#endif
}

/* e^x to about one unit in the last place; 0 below -87, infinite above 88, NaN stays NaN. By
 * 2^n * e^r with |r| <= ln(2) / 2; ln(2) in two parts keeps r exact. */
INLINE floats OP(exponential)(floats x) {
    const floats round = OP(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const floats shifted = OP(fused)(x, OP(splat)(1.44269504f), round);
    const floats n = shifted - round;
    floats r = OP(fused)(n, OP(splat)(-0.693145752f), x);
    r = OP(fused)(n, OP(splat)(-1.42860677e-6f), r);
    floats p = OP(splat)(1.0f / 720);
    p = OP(fused)(p, r, OP(splat)(1.0f / 120));
    p = OP(fused)(p, r, OP(splat)(1.0f / 24));
    p = OP(fused)(p, r, OP(splat)(1.0f / 6));
    p = OP(fused)(p, r, OP(splat)(0.5f));
    p = OP(fused)(p, r, OP(splat)(1.0f));
    p = OP(fused)(p, r, OP(splat)(1.0f));
    p *= (floats)(((words)shifted << 23) + 0x3f800000u); /* n into the exponent of 1 */
    p = OP(choose)(x < OP(splat)(-87.0f), OP(splat)(0.0f), p);
    return OP(choose)(x > OP(splat)(88.0f), OP(splat)(INFINITY), p);
}

INLINE halves OP(to_bf16)(floats v) {
#if LEVEL == 3
    return (halves)_mm512_cvtneps_pbh((__m512)v);
#else
    /* Round to nearest, ties to even; a NaN must not be rounded to infinity. */
    const words bits = (words)v;
    const words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const words quiet = bits | 0x400000;
    const words nan = (words)(v != v);
    return __builtin_convertvector(((nan & quiet) | (~nan & rounded)) >> 16, halves);
#endif
}

INLINE floats OP(from_bf16)(halves v) {
    return (floats)(__builtin_convertvector(v, words) << 16);
}

/* What storing and loading would make of it: the data type's own precision. */
INLINE floats OP(rounded)(floats v, int bf16) {
    return bf16 ? OP(from_bf16)(OP(to_bf16)(v)) : v;
}

/* Elements i to i + n of an array; lanes from n on are 0. */
INLINE floats OP(load)(const void *array, int64_t i, int64_t n, int bf16) {
    if (bf16) {
        const uint16_t *p = (const uint16_t *)array + i;
        if (n >= LANES) return OP(from_bf16)(*(const halves_in *)p);
        halves v = {0};
        memcpy(&v, p, (size_t)n * 2);
        return OP(from_bf16)(v);
    }
    const float *p = (const float *)array + i;
    if (n >= LANES) return OP(load_floats)(p);
    floats v = {0};
    memcpy(&v, p, (size_t)n * 4);
    return v;
}

INLINE void OP(store)(void *array, int64_t i, int64_t n, floats v, int bf16) {
    if (bf16) {
        uint16_t *p = (uint16_t *)array + i;
        const halves h = OP(to_bf16)(v);
        if (n >= LANES)
            *(halves_in *)p = h;
        else
            memcpy(p, &h, (size_t)n * 2);
        return;
    }
    float *p = (float *)array + i;
    if (n >= LANES)
        OP(store_floats)(p, v);
    else
        memcpy(p, &v, (size_t)n * 4);
}

/* sum + row * unit: one product for float32, two for bfloat16. */
INLINE floats OP(multiply)(floats sum, words row, uint32_t unit, int bf16) {
    if (!bf16) return OP(fused)((floats)row, OP(splat)(bits_to_float(unit)), sum);
#if LEVEL == 3
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row,
                                    (__m512bh)_mm512_set1_epi32((int)unit));
#else
    sum = OP(fused)((floats)(row << 16), OP(splat)(bits_to_float(unit << 16)), sum);
    const floats high = OP(splat)(bits_to_float(unit & 0xffff0000u));
    return OP(fused)((floats)(row & 0xffff0000u), high, sum);
#endif
}

/* ---- The product that everything is made of ----
 * R rows of `a` times T columns of vectors: sums[r][t] += sum over u of a[r][u] * b[t][u]. R and T
 * are constants, so that the sums stay in registers. Column t of unit u is at b[t] + u * step, and
 * `ahead` names what to fetch meanwhile for later: the memory is what limits small batches. */
#if LEVEL >= 2
#define MAX_ROWS 8     /* times PANEL: 24 of 32 registers */
#define CHUNK_ROWS 6   /* times CHUNK */
#elif LEVEL == 1
#define MAX_ROWS 2
#define CHUNK_ROWS 1
#else
#define MAX_ROWS 1
#define CHUNK_ROWS 1
#endif

INLINE void OP(accumulate)(floats *sums, const int R, const int T, const char *const *b,
                           const int64_t step, const uint32_t *a, const int64_t a_stride,
                           const int64_t units, const char *const *ahead, const int bf16) {
    for (int64_t u = 0; u < units; u++) {
        words row[4];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            row[t] = OP(load_words)(b[t] + u * step);
            if (ahead) __builtin_prefetch(ahead[t] + u * step, 0, 3);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const uint32_t unit = ((const word_in *)a)[r * a_stride + u];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
                sums[r * T + t] = OP(multiply)(sums[r * T + t], row[t], unit, bf16);
        }
    }
}

/* Calls X with the constant that `rows` is. */
#if MAX_ROWS == 8
#define WITH_ROWS(rows, X) \
    switch (rows) { \
    case 1: X(1); break; case 2: X(2); break; case 3: X(3); break; case 4: X(4); break; \
    case 5: X(5); break; case 6: X(6); break; case 7: X(7); break; default: X(8); \
    }
#define WITH_CHUNK_ROWS(rows, X) \
    switch (rows) { \
    case 1: X(1); break; case 2: X(2); break; case 3: X(3); break; case 4: X(4); break; \
    case 5: X(5); break; default: X(6); \
    }
#else
#define WITH_ROWS(rows, X) do { if ((rows) == 1) { X(1); } else { X(MAX_ROWS); } } while (0)
#define WITH_CHUNK_ROWS(rows, X) do { (void)(rows); X(1); } while (0)
#endif

/* ---- Attention (flash attention, arXiv 2205.14135, over tiles of the pool) ---- */

struct OP(scratch) {
    float scores[ROWS][SPAN];
    uint32_t weights[ROWS][SPAN];        /* in units */
    float sums[ROWS][HEAD_DIM];
    uint32_t query[ROWS][HEAD_DIM];      /* in units */
    floats total[ROWS];                  /* of the weights, per lane */
    float top[ROWS], decay[ROWS];        /* largest score so far; what the sums shrink by */
} __attribute__((aligned(64)));

INLINE void OP(score_rows)(struct OP(scratch) *s, const int r, const int R, const int units,
                           const char *const *keys, const char *const *ahead, const int bf16) {
    floats sums[CHUNK_ROWS * CHUNK];
#pragma GCC unroll 32
    for (int i = 0; i < R * CHUNK; i++) sums[i] = OP(splat)(0);
    OP(accumulate)(sums, R, CHUNK, keys, 64, s->query[r], HEAD_DIM, units, ahead, bf16);
#pragma GCC unroll 32
    for (int i = 0; i < R * CHUNK; i++)
        OP(store_floats)(&s->scores[r + i / CHUNK][i % CHUNK * LANES], sums[i]);
}

/* Columns d to d + T * 16 of the weighted sum of a chunk's values. */
INLINE void OP(sum_rows)(struct OP(scratch) *s, const int r, const int R, const int d, const int T,
                         const int width, const char *const *values, const char *const *ahead,
                         const int *counts, const int bf16) {
    floats sums[CHUNK_ROWS * 4];
#pragma GCC unroll 32
    for (int i = 0; i < R * T; i++)
        sums[i] = OP(load_floats)(&s->sums[r + i / T][d + i % T * LANES])
                  * OP(splat)(s->decay[r + i / T]);
    for (int c = 0; c < CHUNK; c++) {
        const char *b[4], *later[4];
        for (int t = 0; t < T; t++) {
            b[t] = values[c] + 4 * (d + t * LANES);
            later[t] = ahead[c] + 4 * (d + t * LANES);
        }
        const int units = bf16 ? counts[c] / 2 : counts[c];
        const uint32_t *weights = &s->weights[r][c * (bf16 ? TILE / 2 : TILE)];
        OP(accumulate)(sums, R, T, b, 4 * width, weights, SPAN, units, later, bf16);
        if (!bf16 || counts[c] % 2 == 0) continue;
        /* The second token of the last pair was never written: it may be NaN, which a weight of
         * 0 would not remove. */
        for (int t = 0; t < T; t++) {
            const words row = OP(load_words)(b[t] + (int64_t)units * 4 * width) & 0xffffu;
            for (int i = 0; i < R; i++)
                sums[i * T + t] =
                    OP(multiply)(sums[i * T + t], row, weights[i * SPAN + units], bf16);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * T; i++)
        OP(store_floats)(&s->sums[r + i / T][d + i % T * LANES], sums[i]);
}

/* Scores of a row become weights relative to the largest so far. */
INLINE void OP(weigh_row)(struct OP(scratch) *s, const int r, const struct tile *const *tiles,
                          const int *counts, const float scale, const int64_t position,
                          const int64_t window, const int bf16) {
    floats x[CHUNK], top = OP(splat)(-INFINITY);
#pragma GCC unroll 4
    for (int c = 0; c < CHUNK; c++) {
        x[c] = OP(load_floats)(&s->scores[r][c * LANES]) * OP(splat)(scale);
        const int64_t end = MIN(counts[c], position + 1 - tiles[c]->position);
        const int64_t begin = position - window + 1 - tiles[c]->position;
        if (end < TILE || begin > 0) {
            const ints seen =
                (lane_numbers < (int32_t)end) & (lane_numbers >= (int32_t)MAX(begin, 0));
            x[c] = OP(choose)(seen, x[c], OP(splat)(-INFINITY));
        }
        top = OP(larger)(x[c], top);
    }
    const float before = s->top[r], largest = OP(largest)(top);
    float now = before, decay = 1;
    if (largest > before) {
        now = largest;
        decay = OP(exponential)(OP(splat)(before - now))[0];
    }
    floats total = s->total[r] * OP(splat)(decay);
#pragma GCC unroll 4
    for (int c = 0; c < CHUNK; c++) {
        const floats weight = OP(exponential)(x[c] - OP(splat)(now));
        OP(store)(s->weights[r], c * LANES, LANES, weight, bf16);
        total += weight;
    }
    s->total[r] = total;
    s->top[r] = now;
    s->decay[r] = decay;
}

/* The tiles of an item that its queries see at all: the window may hide its first ones. */
INLINE const struct tile *OP(first_tile)(const struct attention *a, const struct item *item) {
    const struct tile *tile = a->tiles + item->tile, *end = tile + item->num_tiles;
    const int64_t hidden = (int64_t)item->position - a->window;
    while (tile < end && tile->position + tile->count - 1 <= hidden) tile++;
    return tile;
}

INLINE void OP(write_rows)(const struct attention *a, const struct item *item, const int head,
                           const int rows, float (*sums)[HEAD_DIM], const float *totals,
                           const int bf16) {
    const int grouped = a->num_heads / a->num_kv_heads;
    for (int r = 0; r < rows; r++) {
        const int64_t token = item->query + r / grouped;
        const int64_t row = token * a->num_heads + (int64_t)head * grouped + r % grouped;
        const floats share = OP(splat)(1 / totals[r]);
        for (int d = 0; d < a->head_dim; d += LANES)
            OP(store)(a->output, row * a->head_dim + d, MIN(LANES, a->head_dim - d),
                      OP(load_floats)(&sums[r][d]) * share, bf16);
    }
}

/* Results of a sequence that was split: each part's sums, weighed by its largest score. */
INLINE void OP(merge)(const struct attention *a, const struct item *item, const int head,
                      const int rows, struct OP(scratch) *s, const int bf16) {
    const int width = padded(a->head_dim);
    float totals[ROWS];
    for (int r = 0; r < rows; r++) {
        floats sums[HEAD_DIM / LANES];
        for (int d = 0; d < width / LANES; d++) sums[d] = OP(splat)(0);
        const float *part = (const float *)a->partial;
        part += ((int64_t)item->partials * a->num_kv_heads + (int64_t)head * rows + r)
                * (width + 2);
        const int64_t stride = (int64_t)rows * a->num_kv_heads * (width + 2);
        float top = -INFINITY, total = 0;
        for (int i = 0; i < item->num_splits; i++) top = MAX(top, part[i * stride + width]);
        for (int i = 0; i < item->num_splits; i++) {
            const float weight = OP(exponential)(OP(splat)(part[i * stride + width] - top))[0];
            total += part[i * stride + width + 1] * weight;
            for (int d = 0; d < width / LANES; d++)
                sums[d] = OP(fused)(OP(load_floats)(part + i * stride + d * LANES),
                                    OP(splat)(weight), sums[d]);
        }
        for (int d = 0; d < width / LANES; d++) OP(store_floats)(&s->sums[r][d * LANES], sums[d]);
        totals[r] = total;
    }
    OP(write_rows)(a, item, head, rows, s->sums, totals, bf16);
}

INLINE void OP(attend_item)(const struct attention *a, const struct item *item, const int head,
                            const char *following, struct OP(scratch) *s, const int bf16) {
    const int grouped = a->num_heads / a->num_kv_heads, rows = item->num_queries * grouped;
    const int units = key_units(a->head_dim, bf16), width = padded(a->head_dim);
    const int64_t size = tile_bytes(a->head_dim, bf16), element = bf16 ? 2 : 4;
    const char *pool = a->pool + head * size * a->tiles_per_block;
    for (int r = 0; r < rows; r++) {
        const int64_t token = item->query + r / grouped;
        const int64_t first = token * a->query_stride
                              + ((int64_t)head * grouped + r % grouped) * a->head_dim;
        memcpy(s->query[r], a->query + first * element, (size_t)(a->head_dim * element));
        memset(s->sums[r], 0, (size_t)width * sizeof(float));
        s->total[r] = OP(splat)(0);
        s->top[r] = -1e30f; /* finite: what is all hidden then weighs 0, not NaN */
    }
    const struct tile *tile = OP(first_tile)(a, item);
    const struct tile *end = a->tiles + item->tile + item->num_tiles;
    for (; tile < end; tile += CHUNK) {
        const struct tile *tiles[CHUNK];
        const char *keys[CHUNK], *values[CHUNK], *next_keys[CHUNK], *next_values[CHUNK];
        int counts[CHUNK];
        for (int c = 0; c < CHUNK; c++) {
            /* A chunk that is not full repeats its last tile, with nothing seen of it. */
            const int64_t left = end - tile - 1;
            tiles[c] = tile + MIN(c, left);
            counts[c] = c <= left ? tiles[c]->count : 0;
            keys[c] = pool + tiles[c]->index * size;
            values[c] = keys[c] + 64 * units;
            next_keys[c] = left >= CHUNK ? pool + (tile + MIN(c + CHUNK, left))->index * size
                                         : following + c * size;
            next_values[c] = next_keys[c] + 64 * units;
        }
        for (int r = 0; r < rows;) {
#define SCORE(R) OP(score_rows)(s, r, R, units, keys, next_keys, bf16); r += R
            WITH_CHUNK_ROWS(rows - r, SCORE);
#undef SCORE
        }
        for (int r = 0, query = 0, g = 0; r < rows; r++) {
            OP(weigh_row)(s, r, tiles, counts, a->scale, item->position + query, a->window, bf16);
            if (++g == grouped) g = 0, query++;
        }
        for (int r = 0; r < rows;) {
            const int left = rows - r;
            int d = 0, done = 0;
#define SUM(R) OP(sum_rows)(s, r, R, d, 4, width, values, next_values, counts, bf16); done = R
            for (; d + 4 * LANES <= width; d += 4 * LANES) {
                WITH_CHUNK_ROWS(left, SUM);
            }
#undef SUM
#define SUM(R) OP(sum_rows)(s, r, R, d, 1, width, values, next_values, counts, bf16); done = R
            for (; d < width; d += LANES) {
                WITH_CHUNK_ROWS(left, SUM);
            }
#undef SUM
            r += done;
        }
    }
    float totals[ROWS];
    for (int r = 0; r < rows; r++) totals[r] = OP(sum)(s->total[r]);
    if (item->group < 0) {
        OP(write_rows)(a, item, head, rows, s->sums, totals, bf16);
        return;
    }
    float *part = (float *)a->partial;
    part += ((int64_t)item->partial * a->num_kv_heads + (int64_t)head * rows) * (width + 2);
    for (int r = 0; r < rows; r++, part += width + 2) {
        memcpy(part, s->sums[r], (size_t)width * sizeof(float));
        part[width] = s->top[r];
        part[width + 1] = totals[r];
    }
    int32_t *unfinished = a->unfinished + (int64_t)item->group * a->num_kv_heads + head;
    if (__atomic_sub_fetch(unfinished, 1, __ATOMIC_ACQ_REL) == 0) {
        OP(merge)(a, item, head, rows, s, bf16); /* the last one to finish sees all parts */
        *unfinished = item->num_splits;
    }
}

INLINE void OP(attention)(struct attention *a, const int bf16) {
    struct OP(scratch) s;
    const int64_t heads = a->num_kv_heads, all = a->work.total;
    const int64_t size = tile_bytes(a->head_dim, bf16);
    int64_t index = take(&a->work, 1);
    while (index < all) {
        /* Taken before the work on this one, which then fetches what that one reads first. */
        const int64_t following = take(&a->work, 1), i = following < all ? following : index;
        const struct tile *tile = OP(first_tile)(a, a->items + i / heads);
        const int64_t first = tile->index + i % heads * a->tiles_per_block;
        OP(attend_item)(a, a->items + index / heads, (int)(index % heads), a->pool + first * size,
                        &s, bf16);
        finish(&a->work, 1);
        index = following;
    }
}

/* ---- Queries and keys are normed and rotated; keys and values go to the pool ---- */

/* One head in place, `x` in floats: qk-norm if there is a weight, then RoPE. Each step rounds to
 * the data type, as separate operations would. */
INLINE void OP(rotate)(float *x, const struct rope *j, const char *weight, int64_t token,
                       const int bf16) {
    const int size = j->head_dim, half = size / 2;
    if (weight) {
        floats squares = OP(splat)(0);
        for (int d = 0; d < size; d += LANES) {
            const floats v = OP(load)(x, d, size - d, 0);
            squares = OP(fused)(v, v, squares);
        }
        const floats factor = OP(splat)(1 / sqrtf(OP(sum)(squares) / (float)size + j->eps));
        for (int d = 0; d < size; d += LANES) {
            const floats v = OP(rounded)(OP(load)(x, d, size - d, 0) * factor, bf16);
            OP(store)(x, d, size - d,
                      OP(rounded)(v * OP(load)(weight, d, size - d, bf16), bf16), 0);
        }
    }
    for (int d = 0; d < half; d += LANES) {
        const int64_t n = half - d, angle = token * j->angle_stride + d;
        const floats cos = OP(load)(j->cos, angle, n, bf16), sin = OP(load)(j->sin, angle, n, bf16);
        const floats a = OP(load)(x, d, n, 0), b = OP(load)(x, half + d, n, 0);
        const floats first = OP(rounded)(a * cos, bf16) - OP(rounded)(b * sin, bf16);
        const floats second = OP(rounded)(b * cos, bf16) + OP(rounded)(a * sin, bf16);
        OP(store)(x, d, n, first, 0);
        OP(store)(x, half + d, n, second, 0);
    }
}

INLINE void OP(rope)(struct rope *j, const int bf16) {
    const int size = j->head_dim, width = padded(size);
    const int64_t element = bf16 ? 2 : 4, row = (int64_t)j->num_heads + 2 * j->num_kv_heads;
    const int64_t tiles_per_block = (j->block_size + TILE - 1) / TILE;
    float x[HEAD_DIM + LANES];
    uint32_t key[HEAD_DIM + LANES];
    for (int64_t first; (first = take(&j->work, 8)) < j->work.total;) {
        const int64_t last = MIN(first + 8, j->work.total);
        for (int64_t t = first; t < last; t++) {
            for (int h = 0; h < j->num_heads; h++) {
                for (int d = 0; d < size; d += LANES)
                    OP(store_floats)(x + d, OP(load)(j->qkv, (t * row + h) * size + d, size - d,
                                                     bf16));
                OP(rotate)(x, j, j->q_norm, t, bf16);
                for (int d = 0; d < size; d += LANES)
                    OP(store)(j->query, (t * j->num_heads + h) * size + d, size - d,
                              OP(load_floats)(x + d), bf16);
            }
            const int64_t block = j->slots[t] / j->block_size, slot = j->slots[t] % j->block_size;
            const int token = (int)(slot % TILE);
            for (int h = 0; h < j->num_kv_heads; h++) {
                const int64_t index = (block * j->num_kv_heads + h) * tiles_per_block + slot / TILE;
                char *tile = j->pool + index * tile_bytes(size, bf16);
                const int64_t from = (t * row + j->num_heads + h) * size;
                for (int d = 0; d < size; d += LANES)
                    OP(store_floats)(x + d, OP(load)(j->qkv, from + d, size - d, bf16));
                OP(rotate)(x, j, j->k_norm, t, bf16);
                for (int d = 0; d < size; d += LANES)
                    OP(store)(key, d, LANES, OP(load_floats)(x + d), bf16);
                for (int u = 0; u < key_units(size, bf16); u++)
                    ((word_in *)tile)[u * TILE + token] = key[u];
                const char *value = j->qkv + (from + (int64_t)j->num_kv_heads * size) * element;
                char *to = tile + key_bytes(size, bf16);
                if (bf16)
                    for (int d = 0; d < size; d++)
                        ((uint16_t *)to)[(token / 2 * width + d) * 2 + token % 2] =
                            ((const uint16_t *)value)[d];
                else
                    memcpy(to + (int64_t)token * width * 4, value, (size_t)size * 4);
            }
        }
        finish(&j->work, last - first);
    }
}

/* ---- Norm and activation, row by row ---- */

INLINE void OP(norm)(struct norm *j, const int bf16) {
    const int64_t size = j->size, some = MAX(1, 8192 / size);
    for (int64_t first; (first = take(&j->work, some)) < j->work.total;) {
        const int64_t last = MIN(first + some, j->work.total);
        for (int64_t r = first; r < last; r++) {
            const int64_t row = r * size;
            const void *x = j->x;
            floats squares = OP(splat)(0);
            for (int64_t i = 0; i < size; i += LANES) {
                floats v = OP(load)(x, row + i, size - i, bf16);
                if (j->delta) {
                    v = OP(rounded)(v + OP(load)(j->delta, row + i, size - i, bf16), bf16);
                    OP(store)(j->sum, row + i, size - i, v, bf16);
                }
                squares = OP(fused)(v, v, squares);
            }
            if (j->delta) x = j->sum;
            const floats factor = OP(splat)(1 / sqrtf(OP(sum)(squares) / (float)size + j->eps));
            for (int64_t i = 0; i < size; i += LANES) {
                const floats v =
                    OP(rounded)(OP(load)(x, row + i, size - i, bf16) * factor, bf16);
                OP(store)(j->output, row + i, size - i,
                          v * OP(load)(j->weight, i, size - i, bf16), bf16);
            }
        }
        finish(&j->work, last - first);
    }
}

INLINE void OP(activation)(struct activation *j, const int bf16) {
    const int64_t size = j->size, some = MAX(1, 8192 / size);
    for (int64_t first; (first = take(&j->work, some)) < j->work.total;) {
        const int64_t last = MIN(first + some, j->work.total);
        for (int64_t r = first; r < last; r++)
            for (int64_t i = 0; i < size; i += LANES) {
                const floats gate = OP(load)(j->gate_up, 2 * r * size + i, size - i, bf16);
                const floats up = OP(load)(j->gate_up, (2 * r + 1) * size + i, size - i, bf16);
                const floats silu = gate / (OP(exponential)(-gate) + OP(splat)(1));
                OP(store)(j->output, r * size + i, size - i, OP(rounded)(silu, bf16) * up, bf16);
            }
        finish(&j->work, last - first);
    }
}

/* ---- Linear layer ---- */

INLINE void OP(linear_rows)(const struct linear *j, const int64_t m, const int R, const int64_t n,
                            const char *weight, const int64_t units, const int bf16) {
    floats sums[MAX_ROWS * PANEL];
#pragma GCC unroll 32
    for (int i = 0; i < R * PANEL; i++) {
        const int64_t at = n + i % PANEL * LANES, left = j->out_features - at;
        sums[i] = j->bias && left > 0 ? OP(load)(j->bias, at, left, bf16) : OP(splat)(0);
    }
    const char *b[PANEL] = {weight, weight + 64, weight + 128};
    const int64_t element = bf16 ? 2 : 4;
    const char *x = j->x + m * j->x_stride * element;
    OP(accumulate)(sums, R, PANEL, b, 64 * PANEL, (const uint32_t *)x, j->x_stride * element / 4,
                   units, NULL, bf16);
#pragma GCC unroll 32
    for (int i = 0; i < R * PANEL; i++) {
        const int64_t at = n + i % PANEL * LANES, left = j->out_features - at;
        if (left > 0)
            OP(store)(j->output, (m + i / PANEL) * j->out_features + at, left, sums[i],
                      bf16 && !j->float_output);
    }
}

INLINE void OP(linear)(struct linear *j, const int bf16) {
    const int64_t units = bf16 ? j->in_features / 2 : j->in_features, width = PANEL * LANES;
    for (int64_t panel; (panel = take(&j->work, 1)) < j->work.total;) {
        const char *weight = j->weight + panel * units * 64 * PANEL;
        /* The rows in blocks as equal as they can be. */
        int64_t blocks = (j->num_rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t m = 0; m < j->num_rows; blocks--) {
            const int64_t rows = (j->num_rows - m + blocks - 1) / blocks;
#define LINEAR(R) OP(linear_rows)(j, m, R, panel * width, weight, units, bf16)
            WITH_ROWS(rows, LINEAR);
#undef LINEAR
            m += rows;
        }
        finish(&j->work, 1);
    }
}

/* ---- The level's table ---- */

#define TASKS(name) \
    static void OP(name##_float32)(void *job) { OP(name)(job, 0); } \
    static void OP(name##_bfloat16)(void *job) { OP(name)(job, 1); }
TASKS(attention)
TASKS(rope)
TASKS(norm)
TASKS(activation)
TASKS(linear)

static const struct kernels OP(kernels) = {
    {OP(attention_float32), OP(attention_bfloat16)}, {OP(rope_float32), OP(rope_bfloat16)},
    {OP(norm_float32), OP(norm_bfloat16)}, {OP(activation_float32), OP(activation_bfloat16)},
    {OP(linear_float32), OP(linear_bfloat16)},
};

#undef TASKS
#undef MAX_ROWS
#undef CHUNK_ROWS
#undef WITH_ROWS
#undef WITH_CHUNK_ROWS

#if LEVEL >= 1 && defined(__clang__)
#pragma clang attribute pop
#elif LEVEL >= 1
#pragma GCC pop_options
#endif
#undef LEVEL
#undef LEVEL_NAME

#endif
