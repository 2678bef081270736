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
    STRIDE = HEAD_DIM + LANES, /* between rows of heads: no power of 2, lest rows meet in few cache
                                  lines */
    CELL = 8,          /* tiles whose softmax is computed apart, */
    SPLIT = 32,        /* and tiles of whose cells that is merged apart: the most that one thread
                          reads for few queries. Both are counted from the sequence's beginning, so
                          that a result depends neither on the batch nor on the chunk, on what the
                          sequence shares, or on the threads */
    CELLS = SPLIT / CELL,
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

/* Queries and tiles that all of them read: neighbours in one sequence, or of several sequences that
 * hold the same blocks (a shared run). */
struct item {
    int32_t token, num_queries; /* where their list begins in `tokens` */
    int32_t position, advance;  /* of the first query; from one to the next, 0 in a shared run */
    int32_t tile, num_tiles;    /* whole cells of one split; or all that the queries see */
    int32_t cell;               /* the first one's number in the sequence */
    int32_t part;               /* where the results go among a query's parts, if it has some */
};

/* A token of the step. If several items share its work, each leaves parts of it: one if it begins
 * with the split, else one for each cell. */
struct query {
    int32_t num_parts; /* 0 if one item does all */
    int32_t part;      /* number of its first one among all tokens' */
};

struct attention {
    struct work work; /* items of all KV heads */
    const struct tile *tiles;
    const struct item *items;
    const int32_t *tokens; /* all of the step, then those of shared runs */
    const struct query *queries;
    int32_t num_heads, num_kv_heads, head_dim, tiles_per_block;
    float scale;
    int32_t window, longest; /* a window of the longest sequence's length hides nothing */
    char *partial;       /* of each part and KV head, see `part` */
    int32_t *unfinished; /* of each token and KV head: parts to come; between calls, all */
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

#define NOTHING -1e30f /* largest score where none was seen */

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

/* Sequences of a step, as Python describes them. */
struct sequences {
    int64_t count, max_blocks, block_size, num_kv_heads, grouped;
    const int64_t *query_starts, *seq_lens, *block_tables, *block_starts;
    /* Shared runs: of each its rows (from run_starts on) and the block after it. A row's runs come
     * in order, and follow each other from its first block. */
    int64_t num_runs;
    const int64_t *run_rows, *run_starts, *run_ends;
};

/* What a plan writes; see native.py for how much room it needs. */
struct plan {
    struct tile *tiles;
    struct item *items;
    int32_t *tokens;
    struct query *queries;
    int32_t *unfinished;
    int64_t *first_tiles; /* of each sequence, and one more */
    int64_t *cells;       /* of each sequence: how many of its cells runs read, */
    int64_t *parts;       /* and the parts that these are */
    int64_t num_items, num_parts;
};

static int64_t plan_tiles(const struct sequences *q, struct tile *tiles, int64_t *first_tiles) {
    const int32_t tiles_per_block = (int32_t)((q->block_size + TILE - 1) / TILE);
    int64_t n = 0;
    for (int64_t s = 0; s < q->count; s++) {
        const int64_t *table = q->block_tables + s * q->max_blocks;
        const int64_t *start = q->block_starts + s * (q->max_blocks + 1);
        first_tiles[s] = n;
        for (int64_t b = 0; b < q->max_blocks && start[b] < q->seq_lens[s]; b++) {
            const int64_t filled = MIN(start[b + 1], q->seq_lens[s]) - start[b];
            for (int32_t t = 0; t * TILE < filled; t++)
                tiles[n++] = (struct tile){
                    .index = (int32_t)(table[b] * q->num_kv_heads * tiles_per_block + t),
                    .position = (int32_t)(start[b] + t * TILE),
                    .count = (int32_t)MIN(TILE, filled - t * TILE),
                };
        }
    }
    return first_tiles[q->count] = n;
}

static int64_t split_end(int64_t cell, int64_t end) {
    return MIN((cell / CELLS + 1) * CELLS, end);
}

static int64_t parts_of(int64_t cell, int64_t end) { return cell % CELLS ? end - cell : 1; }

/* The cells that lie in a run, for its rows: together, as far as an item can hold them. A cell on
 * the border of two runs belongs to the deeper one, whose rows hold all of it; the last run's end
 * is rounded down to whole cells. */
static void plan_run(const struct sequences *q, int64_t run, struct plan *p, int32_t *tokens) {
    const int64_t *rows = q->run_rows + q->run_starts[run];
    const int64_t num_rows = q->run_starts[run + 1] - q->run_starts[run];
    const int64_t *start = q->block_starts + rows[0] * (q->max_blocks + 1);
    const int64_t last = q->run_ends[run];
    const int64_t most = MAX(1, ROWS / q->grouped), groups = (num_rows + most - 1) / most;
    int64_t tiles = 0, cell = p->cells[rows[0]], part = p->parts[rows[0]];
    for (int64_t b = 0; b < last; b++) tiles += (start[b + 1] - start[b] + TILE - 1) / TILE;
    const int64_t end = tiles / CELL;
    for (int64_t to; cell < end; part += parts_of(cell, to), cell = to) {
        to = split_end(cell, end);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = num_rows * g / groups;
            p->items[p->num_items++] = (struct item){
                .token = (int32_t)(tokens - p->tokens + row),
                .num_queries = (int32_t)(num_rows * (g + 1) / groups - row),
                .position = (int32_t)start[last],
                .tile = (int32_t)(p->first_tiles[rows[0]] + cell * CELL),
                .num_tiles = (int32_t)((to - cell) * CELL),
                .cell = (int32_t)cell,
                .part = (int32_t)part,
            };
        }
    }
    for (int64_t i = 0; i < num_rows; i++) {
        tokens[i] = (int32_t)q->query_starts[rows[i]];
        p->cells[rows[i]] = cell;
        p->parts[rows[i]] = part;
    }
}

/* What is left of a sequence after its runs. */
static void plan_sequence(const struct sequences *q, int64_t s, struct plan *p) {
    const int32_t queries_per_item = (int32_t)MAX(1, ROWS / q->grouped);
    const int32_t num_queries = (int32_t)(q->query_starts[s + 1] - q->query_starts[s]);
    const int32_t offset = (int32_t)q->seq_lens[s] - num_queries;
    const int32_t first = (int32_t)p->first_tiles[s];
    int32_t end = (int32_t)p->first_tiles[s + 1];
    for (int32_t i = 0; i < num_queries; i++) {
        const int32_t token = (int32_t)q->query_starts[s] + i;
        p->tokens[token] = token;
        p->queries[token] = (struct query){0};
    }
    const int64_t cells = (end - first + CELL - 1) / CELL;
    if (num_queries > queries_per_item || (p->cells[s] == 0 && cells <= CELLS)) {
        /* The last queries read most, so they come first: the threads then end together. */
        for (int32_t i = (num_queries - 1) / queries_per_item * queries_per_item; i >= 0;
             i -= queries_per_item) {
            const int32_t count = MIN(queries_per_item, num_queries - i);
            while (p->tiles[end - 1].position > offset + i + count - 1) end--;
            p->items[p->num_items++] = (struct item){
                .token = (int32_t)q->query_starts[s] + i,
                .num_queries = count,
                .position = offset + i,
                .advance = 1,
                .tile = first,
                .num_tiles = end - first,
            };
        }
        return;
    }
    int64_t part = p->parts[s];
    for (int64_t cell = p->cells[s], to; cell < cells; part += parts_of(cell, to), cell = to) {
        to = split_end(cell, cells);
        p->items[p->num_items++] = (struct item){
            .token = (int32_t)q->query_starts[s],
            .num_queries = num_queries,
            .position = offset,
            .advance = 1,
            .tile = (int32_t)(first + cell * CELL),
            .num_tiles = (int32_t)(MIN(to * CELL, end - first) - cell * CELL),
            .cell = (int32_t)cell,
            .part = (int32_t)part,
        };
    }
    for (int32_t i = 0; i < num_queries; i++) {
        const int64_t token = q->query_starts[s] + i;
        p->queries[token] = (struct query){(int32_t)part, (int32_t)p->num_parts};
        p->num_parts += part;
        for (int64_t h = 0; h < q->num_kv_heads; h++)
            p->unfinished[token * q->num_kv_heads + h] = (int32_t)part;
    }
}

/* Tiles and items of a step. Shared runs come first, being the largest. */
EXPORT void plan_attention(const struct sequences *q, struct plan *p) {
    plan_tiles(q, p->tiles, p->first_tiles);
    memset(p->cells, 0, (size_t)q->count * sizeof *p->cells);
    memset(p->parts, 0, (size_t)q->count * sizeof *p->parts);
    p->num_items = p->num_parts = 0;
    int32_t *tokens = p->tokens + q->query_starts[q->count];
    for (int64_t r = 0; r < q->num_runs; r++) {
        plan_run(q, r, p, tokens);
        tokens += q->run_starts[r + 1] - q->run_starts[r];
    }
    for (int64_t s = 0; s < q->count; s++) plan_sequence(q, s, p);
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

/* All layers and the last norm: `hidden` becomes `normed`. Layers whose window hides something use
 * the plan `windowed`, which knows no shared runs. One call, so that whoever shares the
 * process with the caller can have the interpreter for a whole step, and one fork, since threads
 * that have to meet 300 times a step are slow wherever they do not have their processors to
 * themselves. */
EXPORT void forward(const struct machine *m, int64_t threads, int32_t bf16, const struct step *s,
                    const struct layer *layers, int64_t num_layers, const struct attention *a,
                    const struct attention *windowed, void *room) {
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
        const struct attention *plan = l->window < a->longest ? windowed : a;
        *p = (struct phase){k->attention[bf16], {.attention = *plan}};
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

/* Softmax over some tiles, for each row: sums of values, the largest score that the weights are
 * relative to, sum of the weights. */
struct OP(softmax) {
    float sums[ROWS][STRIDE], top[ROWS], total[ROWS];
};

struct OP(scratch) {
    float scores[ROWS][SPAN];
    uint32_t weights[ROWS][SPAN];        /* in units */
    uint32_t query[ROWS][STRIDE];        /* in units */
    floats total[ROWS];                  /* of a cell's weights, per lane */
    float decay[ROWS];                   /* what the cell's sums shrink by */
    struct OP(softmax) cell, split, all;
} __attribute__((aligned(64)));

INLINE void OP(score_rows)(struct OP(scratch) *s, const int r, const int R, const int units,
                           const char *const *keys, const char *const *ahead, const int bf16) {
    floats sums[CHUNK_ROWS * CHUNK];
#pragma GCC unroll 32
    for (int i = 0; i < R * CHUNK; i++) sums[i] = OP(splat)(0);
    OP(accumulate)(sums, R, CHUNK, keys, 64, s->query[r], STRIDE, units, ahead, bf16);
#pragma GCC unroll 32
    for (int i = 0; i < R * CHUNK; i++)
        OP(store_floats)(&s->scores[r + i / CHUNK][i % CHUNK * LANES], sums[i]);
}

/* Columns d to d + T * 16 of the weighted sum of a chunk's values. */
INLINE void OP(sum_rows)(struct OP(scratch) *s, struct OP(softmax) *x, const int r, const int R,
                         const int d, const int T, const int width, const char *const *values,
                         const char *const *ahead, const int *counts, const int bf16) {
    floats sums[CHUNK_ROWS * 4];
#pragma GCC unroll 32
    for (int i = 0; i < R * T; i++)
        sums[i] = OP(load_floats)(&x->sums[r + i / T][d + i % T * LANES])
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
        OP(store_floats)(&x->sums[r + i / T][d + i % T * LANES], sums[i]);
}

/* Scores of a row become weights relative to the largest so far. */
INLINE void OP(weigh_row)(struct OP(scratch) *s, struct OP(softmax) *softmax, const int r,
                          const struct tile *const *tiles, const int *counts, const float scale,
                          const int64_t position, const int64_t window, const int bf16) {
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
    const float before = softmax->top[r], largest = OP(largest)(top);
    float now = before, decay = 1;
    if (largest > before) {
        now = largest;
        decay = before > NOTHING ? OP(exponential)(OP(splat)(before - now))[0] : 0;
    }
    floats total = s->total[r] * OP(splat)(decay);
#pragma GCC unroll 4
    for (int c = 0; c < CHUNK; c++) {
        const floats weight = OP(exponential)(x[c] - OP(splat)(now));
        OP(store)(s->weights[r], c * LANES, LANES, weight, bf16);
        total += weight;
    }
    s->total[r] = total;
    softmax->top[r] = now;
    s->decay[r] = decay;
}

/* The tiles of an item that its queries see at all: the window may hide its first ones. */
INLINE const struct tile *OP(first_tile)(const struct attention *a, const struct item *item) {
    const struct tile *tile = a->tiles + item->tile, *end = tile + item->num_tiles;
    const int64_t hidden = (int64_t)item->position - a->window;
    while (tile < end && tile->position + tile->count - 1 <= hidden) tile++;
    return tile;
}

INLINE void OP(write_rows)(const struct attention *a, const int32_t *tokens, const int head,
                           const int rows, const struct OP(softmax) *x, const int bf16) {
    const int grouped = a->num_heads / a->num_kv_heads;
    for (int r = 0; r < rows; r++) {
        const int64_t token = tokens[r / grouped];
        const int64_t row = token * a->num_heads + (int64_t)head * grouped + r % grouped;
        const floats share = OP(splat)(1 / x->total[r]);
        for (int d = 0; d < a->head_dim; d += LANES)
            OP(store)(a->output, row * a->head_dim + d, MIN(LANES, a->head_dim - d),
                      OP(load_floats)(&x->sums[r][d]) * share, bf16);
    }
}

/* Add the softmax over the tiles that follow. Cells are added to the first of their split, and
 * splits to the first of all, one by one and in order, whoever computed them: so the rounding is
 * always the same. `tops` and `totals` are read in whole vectors. */
INLINE void OP(add)(struct OP(softmax) *x, const int rows, const int width, const float *sums,
                    const int stride, const float *tops, const float *totals) {
    float old[ROWS], new[ROWS];
    for (int r = 0; r < rows; r += LANES) {
        const floats a = OP(load_floats)(x->top + r), b = OP(load_floats)(tops + r);
        const floats top = OP(larger)(a, b);
        const floats p = OP(exponential)(a - top), q = OP(exponential)(b - top);
        OP(store_floats)(old + r, p);
        OP(store_floats)(new + r, q);
        OP(store_floats)(x->total + r, OP(fused)(OP(load_floats)(totals + r), q,
                                                 OP(load_floats)(x->total + r) * p));
        OP(store_floats)(x->top + r, top);
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < width; d += LANES) {
            const floats sum = OP(load_floats)(&x->sums[r][d]) * OP(splat)(old[r]);
            OP(store_floats)(&x->sums[r][d], OP(fused)(OP(load_floats)(sums + r * stride + d),
                                                       OP(splat)(new[r]), sum));
        }
}

INLINE void OP(add_softmax)(struct OP(softmax) *x, const int rows, const int width,
                            const struct OP(softmax) *y) {
    OP(add)(x, rows, width, y->sums[0], STRIDE, y->top, y->total);
}

/* A part of a token, for the query heads of a KV head: sums, largest scores, sums of weights, and
 * whether it begins a split. */
INLINE float *OP(part)(const struct attention *a, const int32_t token, const int head,
                       const int part) {
    const int64_t grouped = a->num_heads / a->num_kv_heads;
    const int64_t size = grouped * (padded(a->head_dim) + 2) + 1;
    const int64_t index = ((int64_t)a->queries[token].part + part) * a->num_kv_heads + head;
    return (float *)a->partial + index * size;
}

INLINE void OP(store_parts)(const struct attention *a, const int32_t *tokens, const int head,
                            const int rows, const int part, const int opens,
                            const struct OP(softmax) *x) {
    const int grouped = a->num_heads / a->num_kv_heads, width = padded(a->head_dim);
    for (int r = 0; r < rows; tokens++) {
        float *to = OP(part)(a, *tokens, head, part), *top = to + grouped * width;
        for (int g = 0; g < grouped; g++, r++) {
            for (int d = 0; d < width; d += LANES)
                OP(store_floats)(to + g * width + d, OP(load_floats)(&x->sums[r][d]));
            top[g] = x->top[r];
            top[grouped + g] = x->total[r];
        }
        top[2 * grouped] = (float)opens;
    }
}

INLINE void OP(load_part)(const struct attention *a, const int rows, const float *part,
                          struct OP(softmax) *x) {
    const int width = padded(a->head_dim);
    for (int r = 0; r < rows; r++) {
        for (int d = 0; d < width; d += LANES)
            OP(store_floats)(&x->sums[r][d], OP(load_floats)(part + r * width + d));
        x->top[r] = part[rows * width + r];
        x->total[r] = part[rows * (width + 1) + r];
    }
}

/* The output of a token all of whose parts are there. */
INLINE void OP(merge)(const struct attention *a, const int32_t token, const int head,
                      struct OP(scratch) *s, const int bf16) {
    const int grouped = a->num_heads / a->num_kv_heads, width = padded(a->head_dim);
    const int num_parts = a->queries[token].num_parts;
    for (int i = 0; i < num_parts;) {
        struct OP(softmax) *x = i ? &s->split : &s->all;
        OP(load_part)(a, grouped, OP(part)(a, token, head, i), x);
        for (i++; i < num_parts; i++) {
            const float *part = OP(part)(a, token, head, i), *tops = part + grouped * width;
            if (tops[2 * grouped]) break; /* it begins the next split */
            OP(add)(x, grouped, width, part, width, tops, tops + grouped);
        }
        if (x == &s->split) OP(add_softmax)(&s->all, grouped, width, x);
    }
    OP(write_rows)(a, &token, head, grouped, &s->all, bf16);
}

/* Softmax over the tiles up to `stop`; those up to `end` are fetched ahead. */
INLINE void OP(attend_tiles)(const struct attention *a, const struct item *item, const int rows,
                             const char *pool, const struct tile *tile, const struct tile *stop,
                             const struct tile *end, const char *following,
                             struct OP(scratch) *s, struct OP(softmax) *x, const int bf16) {
    const int grouped = a->num_heads / a->num_kv_heads;
    const int units = key_units(a->head_dim, bf16), width = padded(a->head_dim);
    const int64_t size = tile_bytes(a->head_dim, bf16);
    for (int r = 0; r < rows; r++) {
        for (int d = 0; d < width; d += LANES) OP(store_floats)(&x->sums[r][d], OP(splat)(0));
        s->total[r] = OP(splat)(0);
        x->top[r] = NOTHING; /* finite: what is all hidden then weighs 0, not NaN */
    }
    for (; tile < stop; tile += CHUNK) {
        const struct tile *tiles[CHUNK];
        const char *keys[CHUNK], *values[CHUNK], *next_keys[CHUNK], *next_values[CHUNK];
        int counts[CHUNK];
        for (int c = 0; c < CHUNK; c++) {
            /* A chunk that is not full repeats its last tile, with nothing seen of it. */
            const int64_t left = stop - tile - 1, ahead = end - tile - 1;
            tiles[c] = tile + MIN(c, left);
            counts[c] = c <= left ? tiles[c]->count : 0;
            keys[c] = pool + tiles[c]->index * size;
            values[c] = keys[c] + 64 * units;
            next_keys[c] = ahead >= CHUNK ? pool + (tile + MIN(c + CHUNK, ahead))->index * size
                                          : following + c * size;
            next_values[c] = next_keys[c] + 64 * units;
        }
        for (int r = 0; r < rows;) {
#define SCORE(R) OP(score_rows)(s, r, R, units, keys, next_keys, bf16); r += R
            WITH_CHUNK_ROWS(rows - r, SCORE);
#undef SCORE
        }
        int64_t position = item->position;
        for (int r = 0, g = 0; r < rows; r++) {
            OP(weigh_row)(s, x, r, tiles, counts, a->scale, position, a->window, bf16);
            if (++g == grouped) g = 0, position += item->advance;
        }
        for (int r = 0; r < rows;) {
            const int left = rows - r;
            int d = 0, done = 0;
#define SUM(R) OP(sum_rows)(s, x, r, R, d, 4, width, values, next_values, counts, bf16); done = R
            for (; d + 4 * LANES <= width; d += 4 * LANES) {
                WITH_CHUNK_ROWS(left, SUM);
            }
#undef SUM
#define SUM(R) OP(sum_rows)(s, x, r, R, d, 1, width, values, next_values, counts, bf16); done = R
            for (; d < width; d += LANES) {
                WITH_CHUNK_ROWS(left, SUM);
            }
#undef SUM
            r += done;
        }
    }
    for (int r = 0; r < rows; r++) x->total[r] = OP(sum)(s->total[r]);
}

INLINE void OP(attend_item)(const struct attention *a, const struct item *item, const int head,
                            const char *following, struct OP(scratch) *s, const int bf16) {
    const int grouped = a->num_heads / a->num_kv_heads, rows = item->num_queries * grouped;
    const int width = padded(a->head_dim);
    const int64_t size = tile_bytes(a->head_dim, bf16), element = bf16 ? 2 : 4;
    const char *pool = a->pool + head * size * a->tiles_per_block;
    const int32_t *tokens = a->tokens + item->token;
    for (int r = 0; r < rows; r++) {
        const int64_t first = tokens[r / grouped] * a->query_stride
                              + ((int64_t)head * grouped + r % grouped) * a->head_dim;
        memcpy(s->query[r], a->query + first * element, (size_t)(a->head_dim * element));
    }
    const struct tile *tile = a->tiles + item->tile, *end = tile + item->num_tiles;
    const struct tile *seen = tile + (OP(first_tile)(a, item) - tile) / CHUNK * CHUNK;
    const int whole = a->queries[tokens[0]].num_parts == 0, joined = item->cell % CELLS == 0;
    /* The first split's softmax becomes that over all, the first cell's that of its split. */
    struct OP(softmax) *split = &s->all;
    int part = item->part;
    for (int cell = item->cell; tile < end; cell++) {
        const struct tile *stop = MIN(tile + CELL, end);
        const int opens = cell % CELLS == 0, closes = cell % CELLS == CELLS - 1 || stop == end;
        struct OP(softmax) *x = opens || !joined ? split : &s->cell;
        OP(attend_tiles)(a, item, rows, pool, MAX(tile, seen), stop, end, following, s, x, bf16);
        tile = stop;
        if (x != split) OP(add_softmax)(split, rows, width, x);
        if (!whole && (closes || !joined))
            OP(store_parts)(a, tokens, head, rows, part++, joined, split);
        if (!whole || !closes) continue;
        if (split != &s->all) OP(add_softmax)(&s->all, rows, width, split);
        split = &s->split;
    }
    if (whole) {
        OP(write_rows)(a, tokens, head, rows, &s->all, bf16);
        return;
    }
    for (int i = 0; i < item->num_queries; i++) {
        int32_t *unfinished = a->unfinished + (int64_t)tokens[i] * a->num_kv_heads + head;
        if (__atomic_sub_fetch(unfinished, part - item->part, __ATOMIC_ACQ_REL) > 0) continue;
        OP(merge)(a, tokens[i], head, s, bf16); /* the last one to come sees all parts */
        *unfinished = a->queries[tokens[i]].num_parts;
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
