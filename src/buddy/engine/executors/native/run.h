/* What a step works with: the memory of all threads and of each, and the cache's places. */

#ifndef BUDDY_RUN_H
#define BUDDY_RUN_H

#include <stdlib.h>

#include "functions.h"
#include "model.h"
#include "threads.h"

typedef struct {
    const Model *model;
    Cache *cache;
    const Step *step;
    /* Shared by all threads. */
    float *query, *key, *value, *attended; /* by lane */
    bf16 *attended_narrow;
    float *normed, *inner; /* where rows are multiplied, of LANES_AT_ONCE at most */
    bf16 *normed_narrow, *inner_narrow;
    bf16 *normed_panels, *attended_panels, *inner_panels; /* where tiles multiply */
    bf16 *byte_panels; /* of any of these */
    float *low; /* [2, lanes, rank]: of one or two adapters that know the depth */
    int32_t *depth; /* by lane: blocks that it runs, as they know them */
    float *states;  /* of parts that threads share out */
    char *own;       /* memory of each thread */
    size_t own_bytes;
} Run;

#define LANES_AT_ONCE 512 /* whose inner values are there together, where rows are multiplied */

/* Lanes of a step that matrices of few bits are sooner multiplied with row by row than by tiles: of 4 bits,
 * which tiles must unpack to bfloat16, and of INT8. */
#define FEW_OF_INT4 8
#define FEW_OF_INT8 2

/* Whether tiles multiply the lanes of a step with a matrix. */
static int is_by_tiles(const Run *run, const Matrix *matrix)
{
    int few = is_int4(matrix->format) ? FEW_OF_INT4 : matrix->format == INT8 ? FEW_OF_INT8 : 0;
    return run->model->by_tiles && run->step->lanes > few;
}

/* Lanes of a step that may be multiplied row by row at once. */
static size_t lanes_by_rows(const Model *model, const Step *step)
{
    if (model->by_tiles)
        return step->lanes > FEW_OF_INT4 ? 0 : step->lanes;
    return step->lanes < LANES_AT_ONCE ? step->lanes : LANES_AT_ONCE;
}

static inline int row_of(const Step *step, int lane)
{
    return step->row[lane];
}

static inline int slot_of(const Step *step, int lane)
{
    return step->slot[lane];
}

/* A thread's own memory: the normalised vectors, attention's weights, what products work on. */
typedef struct {
    float *normed; /* of HOLES_AT_ONCE at most; of more lanes, all threads make the run's */
    bf16 *normed_narrow;
    bf16 *byte_panels; /* of these */
    float *ups;        /* of a block of vectors, where rows are multiplied */
    float *units;      /* [lanes]: of panels in bytes */
    float *weights;
    float *attention; /* scores of a prompt's lanes, and values as tiles read them */
    void *scratch;
    Vector *vectors;
    float **outputs;
    int32_t *active;
    int32_t *holes; /* [rows of a fill]: row, slot, place */
    float *filling; /* their residuals */
    unsigned opened; /* queues of the team */
} Own;

#define HOLES_AT_ONCE 32
#define BLOCK_VECTORS 64 /* that are attended at once, where no tiles multiply */
#define GATED_VECTORS 96 /* whose gate and up are there at once */
#define LEAST_OF_PROMPT 16 /* tokens of one row that are attended together; a draft has fewer */
#define MOST_TOGETHER 8 /* query heads that share a key head and are attended at once */
#define SLOTS_AT_ONCE 128 /* slots that are attended at once */

/* What attention to some slots gives a query head: the largest score, the sum of weights, weighed values. */
static size_t state_floats(int head_size)
{
    return 2 + (size_t)head_size;
}

/* Lanes up to which their parts are shared out among threads, of which some would else have too little. */
static int lanes_apart(const Model *model, int threads)
{
    return threads == 1 ? 0 : (4 * threads - 1) / model->kv_heads;
}

static void *take(char **at, size_t bytes)
{
    void *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

#if HAS_TILES
#define KEYS_AT_ONCE 32

static size_t whole_keys(int slots)
{
    return ((size_t)slots + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE * KEYS_AT_ONCE;
}

static size_t attention_bytes(const Model *model, int capacity)
{
    size_t scores = whole_keys(capacity) * TILE * sizeof(float);
    return scores + whole_keys(capacity) * model->head_size * sizeof(bf16);
}
#endif

/* What products read of a vector beside its floats. */
#define NARROW_BYTES (HAS_BF16_DOT ? sizeof(bf16) : 0)

static size_t lay_out_own(const Run *run, char *base, Own *own)
{
    const Model *model = run->model;
    const Step *step = run->step;
    char *at = base;
    int lanes = step->lanes > HOLES_AT_ONCE ? step->lanes : HOLES_AT_ONCE;
    size_t normed = (size_t)HOLES_AT_ONCE * model->hidden;
    size_t block = lanes_by_rows(model, step);
    block = block < GATED_VECTORS ? block : GATED_VECTORS;
    own->normed = take(&at, sizeof(float) * normed);
    own->normed_narrow = take(&at, NARROW_BYTES * normed);
    own->byte_panels = take(&at, model->by_tiles ? sizeof(bf16) * normed : 0);
    own->ups = take(&at, sizeof(float) * block * model->inner);
    own->units = take(&at, sizeof(float) * (((size_t)lanes + 15) / 16 * 16));
    own->weights = take(&at, sizeof(float) * SLOTS_AT_ONCE * MOST_TOGETHER);
    int widest = model->inner > model->hidden ? model->inner : model->hidden;
    int attended = model->heads * model->head_size;
    widest = widest > attended ? widest : attended;
    size_t scratch = scratch_floats(widest) * sizeof(float);
#if HAS_TILES
    own->attention = take(&at, attention_bytes(model, run->cache->capacity));
    scratch = tile_bytes(widest) > scratch ? tile_bytes(widest) : scratch;
#elif !HAS_BF16_DOT
    if (step->lanes >= LEAST_OF_PROMPT)
        own->attention = take(&at, sizeof(float) * run->cache->capacity * BLOCK_VECTORS);
#endif
    own->scratch = take(&at, scratch);
    own->vectors = take(&at, sizeof(Vector) * lanes);
    own->outputs = take(&at, sizeof(float *) * lanes);
    own->active = take(&at, sizeof(int32_t) * lanes);
    own->holes = take(&at, sizeof(int32_t) * 3 * HOLES_AT_ONCE);
    own->filling = take(&at, sizeof(float) * HOLES_AT_ONCE * model->hidden);
    return (size_t)(at - base);
}

static void narrow_all(const float *restrict x, bf16 *restrict out, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = narrow(x[i]);
}

/* Of a vector that products read next. Where tiles multiply too, rows meet what tiles read. */
static void narrow_for_products(const Model *model, float *restrict x, bf16 *restrict out, int count)
{
#if HAS_BF16_DOT
    narrow_all(x, out, count);
    for (int i = 0; model->by_tiles && i < count; i++)
        x[i] = widen(out[i]);
#else
    (void)model, (void)x, (void)out, (void)count;
#endif
}

/* Not inlined, so that its sum has one order wherever it is called. */
static __attribute__((noinline)) float rms_scale(const float *x, float epsilon, int count)
{
    return 1.0f / sqrtf(dot_float(x, x, count) / (float)count + epsilon);
}

/* `out` may be `x`. */
static void rms_norm(const float *x, const float *weight, float epsilon, int count, float *out)
{
    float scale = rms_scale(x, epsilon, count);
    for (int i = 0; i < count; i++)
        out[i] = x[i] * scale * weight[i];
}

/* Norm of a head, where the family has one, then its rotation by halves. */
static void rotate(
    const Model *model, float *restrict head, const float *norm, int position)
{
    int count = model->head_size, half = count / 2;
    if (norm != NULL)
        rms_norm(head, norm, model->epsilon, count, head);
    const float *restrict cosines = model->cosines + (size_t)position * count;
    const float *restrict sines = model->sines + (size_t)position * count;
    for (int i = 0; i < half; i++) {
        float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[half + i] + first * sines[half + i];
    }
}

static void store(const Model *model, void *buffer, size_t at, const float *x, int count)
{
    if (model->is_bf16)
        narrow_all(x, (bf16 *)buffer + at, count);
    else
        memcpy((float *)buffer + at, x, sizeof(float) * count);
}

static void load(const Model *model, const void *buffer, size_t at, float *restrict x, int count)
{
    if (!model->is_bf16) {
        memcpy(x, (const float *)buffer + at, sizeof(float) * count);
        return;
    }
    const bf16 *from = (const bf16 *)buffer + at;
    for (int i = 0; i < count; i++)
        x[i] = widen(from[i]);
}

/* The residual that enters the first block, rounded as the general path rounds it. */
static void embed(const Model *model, int64_t token, float *restrict x)
{
    const Matrix *table = &model->embedding;
    size_t at = (size_t)token * table->columns;
    if (table->format < INT8) {
        load(model, table->weights, at, x, table->columns);
        return;
    }
    const int8_t *from = (const int8_t *)table->weights + at;
    for (int i = 0; i < table->columns; i++) {
        float wide = table->scales[table->format == INT8 ? (size_t)token : (at + i) / GROUP] * from[i];
        x[i] = model->is_bf16 ? widen(narrow(wide)) : wide;
    }
}

static size_t cache_at(const Run *run, int row, int head, int slot)
{
    const Cache *cache = run->cache;
    return (((size_t)row * run->model->kv_heads + head) * cache->capacity + slot)
        * run->model->head_size;
}

/* Rotate and store one key head and one value head. */
static void write_cache(
    const Run *run, int block, int row, int slot, int head, float *key, const float *value)
{
    const Model *model = run->model;
    rotate(model, key, model->blocks[block].key_norm, slot);
    size_t at = cache_at(run, row, head, slot);
    store(model, run->cache->keys[block], at, key, model->head_size);
    store(model, run->cache->values[block], at, value, model->head_size);
}

#endif
