/* One decode step of a Llama-like model under a plan: all its blocks in one call.
 *
 * Every thread walks the same blocks and does its share of each stage; a barrier ends a stage. A
 * lane that skips a block costs nothing there: the lanes that run it are a list of pointers, and
 * nothing is gathered or scattered. Source: the block is that of Llama, Mistral, Qwen2 and Qwen3 as
 * transformers computes it; engine/run.py is the reference.
 */

#include <stdlib.h>
#include <time.h>

#include "functions.h"
#include "model.h"
#include "threads.h"

typedef struct {
    const Model *model;
    Cache *cache;
    const Step *step;
    /* Shared by all threads. */
    float *query, *key, *value, *attended, *inner; /* by lane */
    bf16 *attended_narrow, *inner_narrow;
    bf16 *normed_panels, *attended_panels, *inner_panels; /* where tiles multiply */
    int by_tiles; /* all products */
    char *own;       /* memory of each thread */
    size_t own_bytes;
} Run;

static inline int row_of(const Step *step, int lane)
{
    return step->row[lane];
}

static inline int slot_of(const Step *step, int lane)
{
    return step->slot[lane];
}

/* A thread's own memory: the normalised vectors, attention's weights, a row of a matrix. */
typedef struct {
    float *normed;
    bf16 *normed_narrow;
    float *weights;
    float *attention; /* scores and values as tiles read them */
    void *scratch;
    Vector *vectors;
    float **outputs;
    int32_t *active;
    int32_t *holes; /* [rows of a fill]: row, slot, place */
    float *filling; /* their residuals */
    unsigned opened; /* queues of the team */
} Own;

#define HOLES_AT_ONCE 32
#define MOST_TOGETHER 8 /* query heads that share a key head and are attended at once */

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

static size_t lay_out_own(const Model *model, const Step *step, int capacity, char *base, Own *own)
{
    char *at = base;
    int lanes = step->lanes > HOLES_AT_ONCE ? step->lanes : HOLES_AT_ONCE;
    int widest = model->inner > model->hidden ? model->inner : model->hidden;
    int attended = model->heads * model->head_size;
    widest = widest > attended ? widest : attended;
    own->normed = take(&at, sizeof(float) * lanes * model->hidden);
    own->normed_narrow = take(&at, sizeof(bf16) * lanes * model->hidden);
    own->weights = take(&at, sizeof(float) * capacity * MOST_TOGETHER);
#if HAS_TILES
    own->attention = take(&at, attention_bytes(model, capacity));
#endif
#if HAS_TILES
    own->scratch = take(&at, tile_bytes(widest));
#else
    own->scratch = take(&at, sizeof(float) * widest);
#endif
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

/* What a lane may see of one key head: slots before `slots`, but for those hidden and those too old. */
typedef struct {
    size_t base;          /* of the cache's keys and values */
    const uint8_t *hides; /* by slot, or NULL */
    int slots, oldest;
} Sight;

static Sight sight_of(const Run *run, int block, int lane, int kv_head)
{
    const Cache *cache = run->cache;
    int row = row_of(run->step, lane), slots = slot_of(run->step, lane) + 1;
    int window = run->model->blocks[block].window;
    const uint8_t *hides = cache->hidden_slots == NULL ? NULL : cache->hidden_slots[block];
    return (Sight){
        .base = cache_at(run, row, kv_head, 0),
        .hides = hides == NULL ? NULL : hides + (size_t)row * cache->capacity,
        .slots = slots,
        .oldest = window > 0 ? slots - window : 0,
    };
}

/* Scores to weights, in place; one over their sum. */
static float weigh(const Sight *sight, float scaling, float *restrict weights)
{
    int slots = sight->slots;
    if (sight->hides != NULL || sight->oldest > 0)
        for (int slot = 0; slot < slots - 1; slot++)
            if ((sight->hides != NULL && sight->hides[slot]) || slot < sight->oldest)
                weights[slot] = -INFINITY;
    float most = -INFINITY, sum = 0;
    for (int slot = 0; slot < slots; slot++)
        most = weights[slot] > most ? weights[slot] : most;
    for (int slot = 0; slot < slots; slot++) {
        float x = (weights[slot] - most) * scaling;
        weights[slot] = x < -87.0f ? 0.0f : exp_of(x);
        sum += weights[slot];
    }
    return 1.0f / sum;
}

/* One query head. */
static void attend_alone(
    const Model *model, const void *all_keys, const void *all_values, const Sight *sight,
    const float *query, float *restrict weights, float *restrict out)
{
    int count = model->head_size, slots = sight->slots;
    if (model->is_bf16) {
        const bf16 *keys = (const bf16 *)all_keys + sight->base;
        for (int slot = 0; slot < slots; slot++)
            weights[slot] = dot_bf16(keys + (size_t)slot * count, query, count);
    } else {
        const float *keys = (const float *)all_keys + sight->base;
        for (int slot = 0; slot < slots; slot++)
            weights[slot] = dot_float(keys + (size_t)slot * count, query, count);
    }
    float scale = weigh(sight, model->scaling, weights);
    float total[count];
    memset(total, 0, sizeof total);
    if (model->is_bf16) {
        const bf16 *values = (const bf16 *)all_values + sight->base;
        for (int slot = 0; slot < slots; slot++)
            for (int i = 0; i < count; i++)
                total[i] += weights[slot] * widen(values[(size_t)slot * count + i]);
    } else {
        const float *values = (const float *)all_values + sight->base;
        for (int slot = 0; slot < slots; slot++)
            for (int i = 0; i < count; i++)
                total[i] += weights[slot] * values[(size_t)slot * count + i];
    }
    for (int i = 0; i < count; i++)
        out[i] = total[i] * scale;
}

#if HAS_BF16_DOT
/* Scores of a query, in bfloat16 as the keys are. */
static void score(
    const bf16 *keys, const bf16 *query, int count, int slots, float *restrict scores)
{
    for (int slot = 0; slot < slots; slot += SUMS) {
        int here = slots - slot < SUMS ? slots - slot : SUMS;
        __m512 sums[SUMS];
        for (int i = 0; i < SUMS; i++)
            sums[i] = _mm512_setzero_ps();
        for (int i = 0; i < here; i++) {
            const bf16 *key = keys + (size_t)(slot + i) * count;
            for (int at = 0; at < count; at += 32) {
                _mm_prefetch((const char *)(key + at) + BYTES_AHEAD / 2, _MM_HINT_T0);
                sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_loadu_si512(key + at),
                                           (__m512bh)_mm512_loadu_si512(query + at));
            }
        }
        float out[SUMS];
        add_up(sums, out);
        memcpy(scores + slot, out, here * sizeof(float));
    }
}

/* Weighed sums of the values for `together` heads: a value is read and widened once for all. */
static inline __attribute__((always_inline)) void mix(
    const bf16 *values, int count, int slots, const float *weights, size_t stride, int together,
    const float *scales, float *out)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int at = 0; at < count; at += 32) {
        __m512 even[together], odd[together];
        for (int n = 0; n < together; n++)
            even[n] = odd[n] = _mm512_setzero_ps();
        for (int slot = 0; slot < slots; slot++) {
            const bf16 *value = values + (size_t)slot * count + at;
            _mm_prefetch((const char *)value + BYTES_AHEAD / 2, _MM_HINT_T0);
            __m512i pair = _mm512_loadu_si512(value);
            __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            __m512 second = _mm512_castsi512_ps(_mm512_and_si512(pair, high));
            for (int n = 0; n < together; n++) {
                __m512 weight = _mm512_set1_ps(weights[n * stride + slot]);
                even[n] = _mm512_fmadd_ps(weight, first, even[n]);
                odd[n] = _mm512_fmadd_ps(weight, second, odd[n]);
            }
        }
        for (int n = 0; n < together; n++) {
            float a[16], b[16];
            _mm512_storeu_ps(a, even[n]);
            _mm512_storeu_ps(b, odd[n]);
            for (int i = 0; i < 16; i++) {
                out[n * count + at + 2 * i] = a[i] * scales[n];
                out[n * count + at + 2 * i + 1] = b[i] * scales[n];
            }
        }
    }
}

/* Query heads that share a key head. */
static void attend_together(
    const Model *model, const bf16 *keys, const bf16 *values, const Sight *sight,
    const float *queries, int together, float *weights, size_t stride, float *out)
{
    int count = model->head_size;
    float scales[MOST_TOGETHER];
    bf16 query[count];
    for (int n = 0; n < together; n++) {
        narrow_all(queries + n * count, query, count);
        score(keys, query, count, sight->slots, weights + n * stride);
        scales[n] = weigh(sight, model->scaling, weights + n * stride);
    }
    switch (together) {
#define MIX(N)                                                                                     \
    case N:                                                                                        \
        mix(values, count, sight->slots, weights, stride, N, scales, out);                         \
        break;
        MIX(1)
        MIX(2)
        MIX(3)
        MIX(4)
        MIX(5)
        MIX(6)
        MIX(7)
        MIX(8)
#undef MIX
    }
}
#endif

#if HAS_TILES
/* Prompts are attended by tiles, 16 queries of one row at once. Keys are the tiles' rows and queries
 * their columns, so 16 softmaxes go side by side. */

/* scores[slot][query] of up to 16 queries; those of slots from `slots` on mean nothing. */
static void score_tiles(
    const bf16 *keys, int slots, int capacity, const bf16 *panel, int count, float *scores)
{
    for (int slot = 0; slot < slots; slot += TILE) {
        const bf16 *here = keys + (size_t)slot * count;
        bf16 last[TILE * count];
        if (slot + TILE > capacity) { /* behind them the cache may end */
            memset(last, 0, sizeof last);
            memcpy(last, here, (size_t)(slots - slot) * count * sizeof(bf16));
            here = last;
            WRITTEN();
        }
        _tile_zero(0);
        for (int at = 0; at < count; at += DEPTH) {
            _tile_loadd(6, panel + at * TILE, TILE * sizeof(float));
            _tile_loadd(4, here + at, count * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + (size_t)slot * TILE, TILE * sizeof(float));
    }
}

/* e^x for x <= 0, as exp_of. */
static inline __m512 exp_of_16(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), rest);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, rest), rest, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, whole);
}

/* Scores to weights, in place, for 16 queries; one over each one's sum. */
static __m512 weigh_tiles(
    const uint8_t *hides, const int32_t *limits, const int32_t *oldest, int slots, int fewest,
    float scaling, float *scores)
{
    __m512 none = _mm512_set1_ps(-INFINITY), most = none, sum = _mm512_setzero_ps();
    __m512i limit = _mm512_loadu_si512(limits), old = _mm512_loadu_si512(oldest);
    __m512i last = _mm512_sub_epi32(limit, _mm512_set1_epi32(1));
    for (int slot = 0; slot < slots; slot++) {
        __m512 here = _mm512_loadu_ps(scores + (size_t)slot * TILE);
        int is_hidden = hides != NULL && hides[slot];
        if (slot >= fewest || is_hidden) {
            __m512i at = _mm512_set1_epi32(slot);
            __mmask16 seen = _mm512_cmplt_epi32_mask(at, limit) & _mm512_cmpge_epi32_mask(at, old);
            if (is_hidden) /* a token sees itself */
                seen &= _mm512_cmpeq_epi32_mask(at, last);
            here = _mm512_mask_mov_ps(none, seen, here);
            _mm512_storeu_ps(scores + (size_t)slot * TILE, here);
        }
        most = _mm512_max_ps(most, here);
    }
    __m512 scale = _mm512_set1_ps(scaling), least = _mm512_set1_ps(-87.0f);
    for (int slot = 0; slot < slots; slot++) {
        __m512 here = _mm512_loadu_ps(scores + (size_t)slot * TILE);
        __m512 x = _mm512_mul_ps(_mm512_sub_ps(here, most), scale);
        __mmask16 counts = ~_mm512_cmp_ps_mask(x, least, _CMP_LT_OQ); /* what is no number too */
        x = _mm512_maskz_mov_ps(counts, exp_of_16(x));
        _mm512_storeu_ps(scores + (size_t)slot * TILE, x);
        sum = _mm512_add_ps(sum, x);
    }
    memset(scores + (size_t)slots * TILE, 0,
           (whole_keys(slots) - slots) * TILE * sizeof(float));
    return _mm512_div_ps(_mm512_set1_ps(1.0f), sum);
}

/* Values as tiles read them: of 32 slots, two beside each other, in parts of 16 columns. */
static void pack_values(const bf16 *values, int slots, int count, bf16 *packed)
{
    uint16_t first[32], second[32];
    for (int i = 0; i < 16; i++) {
        first[2 * i] = (uint16_t)i, first[2 * i + 1] = (uint16_t)(32 + i);
        second[2 * i] = (uint16_t)(16 + i), second[2 * i + 1] = (uint16_t)(48 + i);
    }
    __m512i low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(second);
    for (int slot = 0; slot < slots; slot += 2)
        for (int at = 0; at < count; at += 32) {
            const bf16 *here = values + (size_t)slot * count + at;
            __m512i a = _mm512_loadu_si512(here);
            __m512i b = slot + 1 < slots ? _mm512_loadu_si512(here + count)
                                         : _mm512_setzero_si512();
            bf16 *out = packed + (size_t)(slot / KEYS_AT_ONCE * KEYS_AT_ONCE) * count
                + (size_t)at * KEYS_AT_ONCE + slot % KEYS_AT_ONCE * TILE;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(out + TILE * KEYS_AT_ONCE, _mm512_permutex2var_epi16(a, high, b));
        }
    for (size_t slot = slots + slots % 2; slot < whole_keys(slots); slot += 2)
        for (int at = 0; at < count; at += TILE)
            memset(packed + slot / KEYS_AT_ONCE * KEYS_AT_ONCE * count + (size_t)at * KEYS_AT_ONCE
                       + slot % KEYS_AT_ONCE * TILE,
                   0, 2 * TILE * sizeof(bf16));
}

/* out[query][column] = weights . values, for 64 columns at most from one on. */
static void mix_tiles(
    const float *weights, const bf16 *packed, int slots, int count, int from, float *out)
{
    int parts = (count - from) / TILE < 4 ? (count - from) / TILE : 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int slot = 0; slot < slots; slot += KEYS_AT_ONCE) {
        __m512 halves[2][TILE];
        bf16 rows[TILE * KEYS_AT_ONCE];
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < TILE; i++)
                halves[half][i] =
                    _mm512_loadu_ps(weights + ((size_t)slot + half * TILE + i) * TILE);
            transpose(halves[half]);
        }
        for (int n = 0; n < TILE; n++)
            _mm512_storeu_si512(rows + n * KEYS_AT_ONCE,
                                (__m512i)_mm512_cvtne2ps_pbh(halves[1][n], halves[0][n]));
        WRITTEN();
        _tile_loadd(4, rows, KEYS_AT_ONCE * sizeof(bf16));
        const bf16 *here = packed + (size_t)slot * count + (size_t)from * KEYS_AT_ONCE;
#define PART(n)                                                                                    \
    if (n < parts) {                                                                               \
        _tile_loadd(6, here + n * TILE * KEYS_AT_ONCE, TILE * sizeof(float));                      \
        _tile_dpbf16ps(n, 4, 6);                                                                   \
    }
        PART(0) PART(1) PART(2) PART(3)
#undef PART
    }
    _tile_stored(0, out, TILE * sizeof(float));
    _tile_stored(1, out + TILE * TILE, TILE * sizeof(float));
    _tile_stored(2, out + 2 * TILE * TILE, TILE * sizeof(float));
    _tile_stored(3, out + 3 * TILE * TILE, TILE * sizeof(float));
}

/* Attention of up to 16 lanes of one row, in the heads that share a key head. */
static void attend_tiles(
    const Run *run, const Own *own, int block, const int32_t *lanes, int held, int kv_head)
{
    const Model *model = run->model;
    const Cache *cache = run->cache;
    int count = model->head_size, sharing = model->heads / model->kv_heads;
    Sight sight = sight_of(run, block, lanes[held - 1], kv_head); /* of the last, who sees most */
    int32_t limits[TILE], oldest[TILE];
    int slots = sight.slots, fewest = sight.slots;
    for (int n = 0; n < TILE; n++) {
        Sight own_sight = sight_of(run, block, lanes[n < held ? n : held - 1], kv_head);
        limits[n] = own_sight.slots, oldest[n] = own_sight.oldest;
        fewest = own_sight.slots < fewest ? own_sight.slots : fewest;
        if (own_sight.oldest > 0)
            fewest = 0; /* some see no slot from the first on */
    }
    const bf16 *keys = (const bf16 *)cache->keys[block] + sight.base;
    const bf16 *values = (const bf16 *)cache->values[block] + sight.base;
    float *scores = own->attention;
    bf16 *packed = (bf16 *)(scores + whole_keys(cache->capacity) * TILE);
    pack_values(values, slots, count, packed);
    set_tiles(TILE);
    for (int head = kv_head * sharing; head < (kv_head + 1) * sharing; head++) {
        bf16 narrowed[TILE * count], panel[TILE * count];
        const bf16 *queries[TILE];
        for (int n = 0; n < held; n++) {
            float *query = run->query + ((size_t)lanes[n] * model->heads + head) * count;
            rotate(model, query, model->blocks[block].query_norm, slot_of(run->step, lanes[n]));
            narrow_all(query, narrowed + n * count, count);
            queries[n] = narrowed + n * count;
        }
        pack_panel(queries, held, 0, count, panel);
        float inverse[TILE], sums[4 * TILE * TILE];
        WRITTEN();
        score_tiles(keys, slots, cache->capacity, panel, count, scores);
        _mm512_storeu_ps(inverse, weigh_tiles(sight.hides, limits, oldest, slots, fewest,
                                              model->scaling, scores));
        for (int from = 0; from < count; from += 4 * TILE) {
            mix_tiles(scores, packed, slots, count, from, sums);
            for (int n = 0; n < held; n++) {
                bf16 *out = run->attended_narrow
                    + ((size_t)lanes[n] * model->heads + head) * count + from;
                __m512 scale = _mm512_set1_ps(inverse[n]);
                for (int i = 0; i < 4 * TILE && from + i < count; i += DEPTH) {
                    const float *sum = sums + i * TILE + n * TILE;
                    __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sum), scale);
                    __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sum + TILE * TILE), scale);
                    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
                }
            }
        }
    }
    _tile_release();
}

/* From how many tokens of one row on they are attended by tiles: a prompt, and no draft. */
#define LEAST_BY_TILES 16

/* Attend the rows that have many lanes here; the lanes of others come to the front of `rest`. */
static int attend_prompts(
    const Run *run, Team *team, int thread, const Own *own, int block, int count, int32_t *rest)
{
    const Model *model = run->model;
    int left = 0, unit = 0;
    int is_for_tiles = run->by_tiles && model->head_size % DEPTH == 0;
    for (int begin = 0, end; begin < count; begin = end) {
        int row = row_of(run->step, own->active[begin]);
        for (end = begin + 1; end < count && row_of(run->step, own->active[end]) == row;)
            end++;
        if (!is_for_tiles || end - begin < LEAST_BY_TILES) {
            for (int n = begin; n < end; n++)
                rest[left++] = own->active[n];
            continue;
        }
        for (int from = begin; from < end; from += TILE)
            for (int head = 0; head < model->kv_heads; head++)
                if (unit++ % size_of(team) == thread)
                    attend_tiles(run, own, block, own->active + from,
                                 end - from < TILE ? end - from : TILE, head);
    }
    return left;
}
#endif

/* How many of the query heads that share a key head one thread takes at once: all, unless threads
 * would be left without any. */
static int heads_together(const Model *model, int count, int threads)
{
#if HAS_BF16_DOT
    int sharing = model->heads / model->kv_heads;
    int is_many = count * model->kv_heads >= 4 * threads || threads == 1;
    if (model->is_bf16 && model->head_size % 32 == 0 && sharing <= MOST_TOGETHER && is_many)
        return sharing;
#endif
    (void)model, (void)count, (void)threads;
    return 1;
}

/* Attention of some query heads of one lane that share a key head. */
static void attend(const Run *run, const Own *own, int block, int lane, int head, int together)
{
    const Model *model = run->model;
    int count = model->head_size, kv_head = head / (model->heads / model->kv_heads);
    size_t at = ((size_t)lane * model->heads + head) * count;
    float *query = run->query + at, *out = run->attended + at;
    for (int n = 0; n < together; n++)
        rotate(model, query + n * count, model->blocks[block].query_norm, slot_of(run->step, lane));
    Sight sight = sight_of(run, block, lane, kv_head);
    const void *keys = run->cache->keys[block], *values = run->cache->values[block];
#if HAS_BF16_DOT
    if (model->is_bf16 && count % 32 == 0)
        attend_together(model, (const bf16 *)keys + sight.base, (const bf16 *)values + sight.base,
                        &sight, query, together, own->weights, run->cache->capacity, out);
    else
#endif
        attend_alone(model, keys, values, &sight, query, own->weights, out);
    narrow_all(out, run->attended_narrow + at, together * count);
}

static void normalise(
    const Run *run, Own *own, const float *norm, const float *residual, int index)
{
    int hidden = run->model->hidden;
    float *out = own->normed + (size_t)index * hidden;
    bf16 *small = own->normed_narrow + (size_t)index * hidden;
    rms_norm(residual, norm, run->model->epsilon, hidden, out);
    narrow_all(out, small, hidden);
    own->vectors[index] = (Vector){out, small};
}

static void set_outputs(Own *own, float *base, size_t stride, int count)
{
    for (int n = 0; n < count; n++)
        own->outputs[n] = base + (size_t)own->active[n] * stride;
}

#if HAS_TILES
#define PIECE 128 /* rows of weights that a thread takes at once for one panel of vectors */
#define BLOCK 256 /* vectors that pass the same rows: a multiple of 32 */

/* Columns of normalised rows as panels have them, in parts of DEPTH columns, panel by panel. */
static void normalise_parts(
    const Model *model, const float *const *rows, const float *norm, int count, int lanes,
    int begin, int end, bf16 *panels)
{
    int parts = model->hidden / DEPTH;
    float scales[TILE];
    for (int unit = begin; unit < end; unit++) {
        int first = unit / parts * TILE, column = unit % parts * DEPTH;
        int held = count - first < TILE ? count - first : TILE;
        if (unit == begin || column == 0)
            for (int n = 0; n < held; n++)
                scales[n] = rms_scale(rows[first + n], model->epsilon, model->hidden);
        __m512 low = _mm512_loadu_ps(norm + column), high = _mm512_loadu_ps(norm + column + 16);
        __m512 pairs[TILE];
        for (int n = 0; n < TILE; n++) {
            pairs[n] = _mm512_setzero_ps();
            if (n >= held)
                continue;
            const float *x = rows[first + n] + column;
            __m512 scale = _mm512_set1_ps(scales[n]);
            __m512 a = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), scale), low);
            __m512 b = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16), scale), high);
            pairs[n] = (__m512)_mm512_cvtne2ps_pbh(b, a);
        }
        bf16 *to = panels + (size_t)first * model->hidden + (size_t)column * lanes;
        if (lanes > 1)
            transpose(pairs);
        for (int i = 0; i < lanes; i++)
            _mm512_storeu_ps(to + i * DEPTH, pairs[i]);
    }
    WRITTEN();
}

/* Normalised rows as panels: of few, each thread makes its own; of more, all make them together. */
static Panels normed_panels(
    const Run *run, Team *team, int thread, const Own *own, const float *const *rows,
    const float *norm, int count, int together)
{
    const Model *model = run->model;
    Panels made = {own->normed_narrow, count, count == 1 ? 1 : TILE};
    int units = (count + TILE - 1) / TILE * (model->hidden / DEPTH), begin = 0, end = units;
    if (together && count > 1) {
        made.panels = run->normed_panels;
        share_of(units, 1, team, thread, &begin, &end);
    }
    normalise_parts(model, rows, norm, count, made.lanes, begin, end, (bf16 *)made.panels);
    if (together && count > 1)
        barrier(team);
    return made;
}

static Panels attended_panels(const Run *run, Team *team, int thread, const Own *own, int count)
{
    int width = run->model->heads * run->model->head_size, parts = width / DEPTH, begin, end;
    if (count == 1)
        return (Panels){run->attended_narrow + (size_t)own->active[0] * width, 1, 1};
    share_of((count + TILE - 1) / TILE * parts, 1, team, thread, &begin, &end);
    for (int unit = begin; unit < end; unit++) {
        int first = unit / parts * TILE, column = unit % parts * DEPTH;
        const bf16 *rows[TILE];
        for (int n = 0; n < TILE && first + n < count; n++)
            rows[n] = run->attended_narrow + (size_t)own->active[first + n] * width;
        pack_panel(rows, count - first, column, column + DEPTH,
                   run->attended_panels + (size_t)first * width);
    }
    WRITTEN();
    barrier(team);
    return (Panels){run->attended_panels, count, TILE};
}

/* What threads do of a product with a matrix, or with two that are gated. Vectors are taken in blocks
 * that stay in a core's own cache while rows pass. */
static void multiply_pieces(
    Team *team, Own *own, const Matrix *matrix, const Matrix *up, const Panels *x, const Sink *sink)
{
    /* Few vectors are soon multiplied: larger pieces then, which memory serves better. */
    int most = matrix->rows / (4 * size_of(team)), rows = PIECE * TILE / x->count, begin, end;
    rows = ((rows > most ? most : rows) / (2 * TILE) + 1) * 2 * TILE;
    int pieces = (matrix->rows + rows - 1) / rows, blocks = (x->count + BLOCK - 1) / BLOCK;
    Queue queue = open_queue(team, &own->opened, pieces * blocks, 1);
    while (take_piece(&queue, &begin, &end)) {
        int first = begin / pieces * BLOCK, row = begin % pieces * rows, left = x->count - first;
        Panels here = {x->panels + (size_t)first * matrix->columns, left < BLOCK ? left : BLOCK,
                       x->lanes};
        Sink there = *sink;
        if (there.inner != NULL)
            there.inner += (size_t)first * matrix->rows;
        else
            there.active += first;
        multiply_by_tiles(matrix, up, &here, row,
                          row + rows < matrix->rows ? row + rows : matrix->rows, &there,
                          own->scratch);
    }
}

static void place_product(
    Team *team, Own *own, const Matrix *matrix, const Panels *x, float *base, size_t stride,
    int adds)
{
    Sink sink = {.base = base, .stride = stride, .active = own->active, .adds = adds};
    multiply_pieces(team, own, matrix, NULL, x, &sink);
}
#endif

static void multiply_share(
    Team *team, int thread, const Own *own, const Matrix *matrix, int count)
{
    int begin, end;
    share_of(matrix->rows, TILE, team, thread, &begin, &end);
    multiply_rows(matrix, own->vectors, count, begin, end, own->outputs, own->scratch);
}

/* Normalise rows and multiply them with some matrices; the sums of active lane n go to
 * outputs[i] + active[n] * (rows of matrix i). A barrier must follow. */
static void project(
    const Run *run, Team *team, int thread, Own *own, const float *const *rows, const float *norm,
    int count, int together, const Matrix *const *matrices, float *const *outputs, int number)
{
#if HAS_TILES
    if (run->by_tiles) {
        Panels x = normed_panels(run, team, thread, own, rows, norm, count, together);
        for (int i = 0; i < number; i++)
            place_product(team, own, matrices[i], &x, outputs[i], (size_t)matrices[i]->rows, 0);
        return;
    }
#endif
    (void)together;
    for (int n = 0; n < count; n++)
        normalise(run, own, norm, rows[n], n);
    for (int i = 0; i < number; i++) {
        set_outputs(own, outputs[i], (size_t)matrices[i]->rows, count);
        multiply_share(team, thread, own, matrices[i], count);
    }
}

/* Add a product to the residual of the active lanes. */
static void add_share(Team *team, int thread, const Run *run, Own *own, const Matrix *matrix, int count)
{
    int begin, end, hidden = run->model->hidden;
    share_of(matrix->rows, TILE, team, thread, &begin, &end);
    float *products[count];
    for (int n = 0; n < count; n++) /* the query's space is free by now */
        products[n] = run->query + (size_t)own->active[n] * hidden;
    multiply_rows(matrix, own->vectors, count, begin, end, products, own->scratch);
    for (int n = 0; n < count; n++) {
        float *residual = run->step->residual + (size_t)own->active[n] * hidden;
        for (int i = begin; i < end; i++)
            residual[i] += products[n][i];
    }
}

/* Attention's output, added to the residual. */
static void add_attended(Run *run, Team *team, int thread, Own *own, const Matrix *output, int count)
{
    size_t width = (size_t)run->model->heads * run->model->head_size;
#if HAS_TILES
    if (run->by_tiles) {
        Panels x = attended_panels(run, team, thread, own, count);
        place_product(team, own, output, &x, run->step->residual, run->model->hidden, 1);
        return;
    }
#endif
    for (int n = 0; n < count; n++) {
        size_t at = (size_t)own->active[n] * width;
        own->vectors[n] = (Vector){run->attended + at, run->attended_narrow + at};
    }
    add_share(team, thread, run, own, output, count);
}

/* The MLP, added to the residual. */
static void add_mlp(
    Run *run, Team *team, int thread, Own *own, const Block *weights, const float *const *rows,
    int count)
{
    const Model *model = run->model;
#if HAS_TILES
    if (run->by_tiles) {
        Panels x = normed_panels(run, team, thread, own, rows, weights->mlp_norm, count, 1);
        Sink sink = {.inner = run->inner_panels};
        multiply_pieces(team, own, &weights->gate, &weights->up, &x, &sink);
        barrier(team);
        x.panels = run->inner_panels;
        place_product(team, own, &weights->down, &x, run->step->residual, model->hidden, 1);
        return;
    }
#endif
    int begin, end;
    share_of(model->inner, TILE, team, thread, &begin, &end);
    float *gates[count], *ups[count];
    for (int n = 0; n < count; n++) {
        normalise(run, own, weights->mlp_norm, rows[n], n);
        gates[n] = run->inner + (size_t)(2 * own->active[n]) * model->inner;
        ups[n] = gates[n] + model->inner;
    }
    multiply_rows(&weights->gate, own->vectors, count, begin, end, gates, own->scratch);
    multiply_rows(&weights->up, own->vectors, count, begin, end, ups, own->scratch);
    for (int n = 0; n < count; n++) {
        bf16 *small = run->inner_narrow + (size_t)own->active[n] * model->inner;
        for (int i = begin; i < end; i++)
            gates[n][i] = silu(gates[n][i]) * ups[n][i];
        narrow_all(gates[n] + begin, small + begin, end - begin);
    }
    barrier(team);
    for (int n = 0; n < count; n++)
        own->vectors[n] =
            (Vector){gates[n], run->inner_narrow + (size_t)own->active[n] * model->inner};
    add_share(team, thread, run, own, &weights->down, count);
}

static void attend_all(Run *run, Team *team, int thread, Own *own, int block, int count)
{
    const int32_t *alone = own->active;
    int left = count, heads = run->model->heads, begin, end;
#if HAS_TILES
    int32_t rest[count];
    left = attend_prompts(run, team, thread, own, block, count, rest);
    alone = rest;
#endif
    int together = heads_together(run->model, left, size_of(team)), units = heads / together;
    share_of(left * units, 1, team, thread, &begin, &end);
    for (int unit = begin; unit < end; unit++)
        attend(run, own, block, alone[unit / units], unit % units * together, together);
}

static void run_block(Run *run, Team *team, int thread, Own *own, int block, int count)
{
    const Model *model = run->model;
    const Step *step = run->step;
    const Block *weights = &model->blocks[block];
    int head = model->head_size, kv_heads = model->kv_heads, begin, end;
    const float *rows[count];
    for (int n = 0; n < count; n++)
        rows[n] = step->residual + (size_t)own->active[n] * model->hidden;
    project(run, team, thread, own, rows, weights->attention_norm, count, 1,
            (const Matrix *[]){&weights->query, &weights->key, &weights->value},
            (float *[]){run->query, run->key, run->value}, 3);
    barrier(team);
    share_of(count * kv_heads, 1, team, thread, &begin, &end);
    for (int unit = begin; unit < end; unit++) {
        int lane = own->active[unit / kv_heads], kv_head = unit % kv_heads;
        size_t at = ((size_t)lane * kv_heads + kv_head) * head;
        write_cache(run, block, row_of(step, lane), slot_of(step, lane), kv_head, run->key + at,
                    run->value + at);
    }
    barrier(team);
    attend_all(run, team, thread, own, block, count);
    barrier(team);
    add_attended(run, team, thread, own, &weights->output, count);
    barrier(team);
    add_mlp(run, team, thread, own, weights, rows, count);
    if (thread == 0)
        for (int n = 0; n < count; n++) {
            int lane = own->active[n];
            step->executed[lane]++;
            if (step->leaves < RESIDUAL)
                continue;
            int32_t *filled = &run->cache->filled[block * run->cache->rows + row_of(step, lane)];
            if (*filled == slot_of(step, lane))
                ++*filled;
        }
    barrier(team);
}

static void leave_zeros(const Run *run, int block, int row, int slot)
{
    const Model *model = run->model;
    size_t bytes = (size_t)model->head_size * (model->is_bf16 ? sizeof(bf16) : sizeof(float));
    for (int head = 0; head < model->kv_heads; head++) {
        size_t at = cache_at(run, row, head, slot) / model->head_size;
        memset((char *)run->cache->keys[block] + at * bytes, 0, bytes);
        memset((char *)run->cache->values[block] + at * bytes, 0, bytes);
    }
}

/* What lanes leave in a block that they skip. A residual is kept once: all blocks up to the next one
 * that the lane runs share one place. */
static void leave(const Run *run, int block, int32_t *place)
{
    const Step *step = run->step;
    Cache *cache = run->cache;
    int hidden = run->model->hidden;
    for (int lane = 0; lane < step->lanes; lane++) {
        int row = row_of(step, lane), slot = slot_of(step, lane);
        if (step->runs[(size_t)lane * run->model->num_blocks + block]) {
            place[lane] = -1;
        } else if (step->leaves == ZEROS) {
            leave_zeros(run, block, row, slot);
        } else if (step->leaves == HIDDEN) {
            cache->hidden_slots[block][(size_t)row * cache->capacity + slot] = 1;
        } else {
            if (place[lane] < 0) {
                place[lane] = cache->num_skipped++;
                store(run->model, cache->skipped, (size_t)place[lane] * hidden,
                      step->residual + (size_t)lane * hidden, hidden);
            }
            size_t at = (size_t)block * cache->rows + row;
            cache->waiting[at * cache->capacity + slot] = place[lane];
        }
    }
}

/* Next slots of a row that wait in a block, from `*slot` on; how many were found. */
static int find_holes(
    const Cache *cache, int block, int row, int stop, int *slot, int32_t *holes, int found)
{
    const int32_t *waiting =
        cache->waiting + ((size_t)block * cache->rows + row) * cache->capacity;
    for (; *slot < stop && found < HOLES_AT_ONCE; ++*slot)
        if (waiting[*slot] >= 0) {
            holes[3 * found] = row;
            holes[3 * found + 1] = *slot;
            holes[3 * found + 2] = waiting[*slot];
            found++;
        }
    return found;
}

/* Project keys and values of up to HOLES_AT_ONCE residuals of tokens that skipped a block. */
static void fill_holes(Run *run, Team *team, int thread, Own *own, int block, int found)
{
    const Model *model = run->model;
    Cache *cache = run->cache;
    const Block *weights = &model->blocks[block];
    int width = model->kv_heads * model->head_size, begin, end;
    int32_t active[HOLES_AT_ONCE];
    Own here = *own;
    here.active = active;
    const float *rows[HOLES_AT_ONCE];
    for (int n = 0; n < found; n++) {
        float *residual = own->filling + (size_t)n * model->hidden;
        active[n] = n, rows[n] = residual;
        load(model, cache->skipped, (size_t)own->holes[3 * n + 2] * model->hidden, residual,
             model->hidden);
    }
    project(run, team, thread, &here, rows, weights->attention_norm, found, 0,
            (const Matrix *[]){&weights->key, &weights->value}, (float *[]){run->key, run->value}, 2);
    own->opened = here.opened;
    barrier(team);
    share_of(found * model->kv_heads, 1, team, thread, &begin, &end);
    for (int unit = begin; unit < end; unit++) {
        int n = unit / model->kv_heads, head = unit % model->kv_heads;
        int row = own->holes[3 * n], slot = own->holes[3 * n + 1];
        size_t at = (size_t)n * width + (size_t)head * model->head_size;
        write_cache(run, block, row, slot, head, run->key + at, run->value + at);
    }
    barrier(team);
}

/* The first slot of a lane's row that may not be filled from: its own, or, where it has just passed
 * the block by and projects at once, the next. */
static int stop_of(const Step *step, int lane, int beyond)
{
    return slot_of(step, lane) + beyond;
}

static int any_waits(const Run *run, const Own *own, int block, int count, int beyond)
{
    const Cache *cache = run->cache;
    for (int n = 0; n < count; n++) {
        int lane = own->active[n], row = row_of(run->step, lane);
        if (cache->filled[(size_t)block * cache->rows + row] < stop_of(run->step, lane, beyond))
            return 1;
    }
    return 0;
}

/* Close the holes that the rows of the active lanes have in a block. */
static void fill_rows(Run *run, Team *team, int thread, Own *own, int block, int count, int beyond)
{
    Cache *cache = run->cache;
    const Step *step = run->step;
    int found = 0;
    for (int n = 0; n < count; n++) {
        int lane = own->active[n], row = row_of(step, lane), stop = stop_of(step, lane, beyond);
        int slot = cache->filled[(size_t)block * cache->rows + row];
        if (n > 0 && row_of(step, own->active[n - 1]) == row)
            slot = stop_of(step, own->active[n - 1], beyond); /* the lane before it went so far */
        while (slot < stop) {
            found = find_holes(cache, block, row, stop, &slot, own->holes, found);
            if (found == HOLES_AT_ONCE) {
                fill_holes(run, team, thread, own, block, found);
                found = 0;
            }
        }
    }
    if (found > 0)
        fill_holes(run, team, thread, own, block, found);
    barrier(team); /* every thread has read what changes below */
    if (thread != 0)
        return;
    for (int n = 0; n < count; n++) {
        int row = row_of(step, own->active[n]), stop = stop_of(step, own->active[n], beyond);
        size_t at = (size_t)block * cache->rows + row;
        for (; cache->filled[at] < stop; cache->filled[at]++)
            cache->waiting[at * cache->capacity + cache->filled[at]] = -1;
    }
}

static int collect(const Run *run, Own *own, int block, int runs)
{
    const Step *step = run->step;
    int count = 0;
    for (int lane = 0; lane < step->lanes; lane++)
        if (step->runs[(size_t)lane * run->model->num_blocks + block] == runs)
            own->active[count++] = lane;
    return count;
}

enum { IN_BLOCKS, FILLING, PROJECTING };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Note what has passed since `*since` as that of a stage; the next begins. */
static void turn(const Step *step, int thread, int stage, double *since)
{
    if (step->seconds == NULL || thread != 0)
        return;
    double now = now_s();
    step->seconds[stage] += now - *since;
    *since = now;
}

static void pass_and_run(Run *run, Team *team, int thread, Own *own, int block, int32_t *place)
{
    const Step *step = run->step;
    double since = step->seconds == NULL ? 0 : now_s();
    int skipping = collect(run, own, block, 0);
    if (thread == 0)
        leave(run, block, place);
    if (skipping > 0 && (step->leaves == PROJECTED || step->shares_rows))
        barrier(team); /* what was left is read below, of zeros and hidden slots by attention */
    if (skipping > 0 && step->leaves == PROJECTED) {
        fill_rows(run, team, thread, own, block, skipping, 1);
        if (step->shares_rows)
            barrier(team); /* the same rows are asked about next */
    }
    int running = collect(run, own, block, 1);
    if (running > 0 && step->leaves >= RESIDUAL && any_waits(run, own, block, running, 0))
        fill_rows(run, team, thread, own, block, running, 0);
    turn(step, thread, FILLING, &since);
    if (running == 0)
        return;
    run_block(run, team, thread, own, block, running);
    turn(step, thread, IN_BLOCKS, &since);
}

static void final_logits(Run *run, Team *team, int thread, Own *own)
{
    const Model *model = run->model;
    const Step *step = run->step;
    const float *rows[step->lanes];
    for (int lane = 0; lane < step->lanes; lane++) {
        own->active[lane] = lane;
        rows[lane] = step->residual + (size_t)lane * model->hidden;
    }
    project(run, team, thread, own, rows, model->final_norm, step->lanes, 1,
            (const Matrix *[]){&model->vocabulary}, (float *[]){step->logits}, 1);
}

static void run_all(void *argument, Team *team, int thread)
{
    Run *run = argument;
    const Model *model = run->model;
    const Step *step = run->step;
    Own own = {0};
    int32_t place[step->lanes];
    lay_out_own(model, step, run->cache->capacity, run->own + thread * run->own_bytes, &own);
    for (int lane = 0; lane < step->lanes; lane++) {
        place[lane] = -1;
        if (thread == 0 && step->first == 0)
            load(model, model->embedding, (size_t)step->tokens[lane] * model->hidden,
                 step->residual + (size_t)lane * model->hidden, model->hidden);
    }
    barrier(team);
    for (int block = step->first; block < step->stop; block++)
        pass_and_run(run, team, thread, &own, block, place);
    if (step->logits == NULL)
        return;
    double since = step->seconds == NULL ? 0 : now_s();
    final_logits(run, team, thread, &own);
    if (step->seconds != NULL)
        barrier(team); /* the projection ends with its slowest thread */
    turn(step, thread, PROJECTING, &since);
}

/* Memory that steps use, kept from one to the next. */
typedef struct {
    OpenMP openmp;
    char *memory;
    size_t bytes;
    int has_tiles;
} Engine;

static size_t lay_out(Run *run, char *base, int threads)
{
    const Model *model = run->model;
    const Step *step = run->step;
    char *at = base;
    Own own;
    size_t lanes = step->lanes, holes = lanes > HOLES_AT_ONCE ? lanes : HOLES_AT_ONCE;
    size_t attended = (size_t)model->heads * model->head_size;
    size_t widest = attended > (size_t)model->hidden ? attended : (size_t)model->hidden;
    size_t kv_width = (size_t)model->kv_heads * model->head_size;
    run->query = take(&at, sizeof(float) * lanes * widest);
    run->key = take(&at, sizeof(float) * holes * kv_width);
    run->value = take(&at, sizeof(float) * holes * kv_width);
    run->attended = take(&at, sizeof(float) * lanes * attended);
    run->attended_narrow = take(&at, sizeof(bf16) * lanes * attended);
    if (run->by_tiles) {
        size_t held = (lanes + 15) / 16 * 16; /* whole panels */
        run->normed_panels = take(&at, sizeof(bf16) * held * model->hidden);
        run->attended_panels = take(&at, sizeof(bf16) * held * attended);
        run->inner_panels = take(&at, sizeof(bf16) * held * model->inner);
    } else {
        run->inner = take(&at, sizeof(float) * 2 * lanes * model->inner);
        run->inner_narrow = take(&at, sizeof(bf16) * lanes * model->inner);
    }
    run->own = at;
    run->own_bytes = lay_out_own(model, step, run->cache->capacity, NULL, &own);
    return (size_t)(at - base) + run->own_bytes * threads;
}

/* Whether this processor and system have tiles. */
int buddy_has_tiles(const Engine *engine)
{
    return engine->has_tiles;
}

/* Run blocks of one step; 0, or -1 where memory ran out. */
int buddy_step(Engine *engine, int threads, const Model *model, Cache *cache, const Step *step)
{
    Run run = {.model = model, .cache = cache, .step = step, .by_tiles = model->by_tiles};
    size_t bytes = lay_out(&run, NULL, threads);
    if (bytes > engine->bytes) {
        free(engine->memory);
        engine->memory = NULL, engine->bytes = 0;
        if (posix_memalign((void **)&engine->memory, 64, bytes) != 0)
            return -1;
        engine->bytes = bytes;
    }
    lay_out(&run, engine->memory, threads);
    run_job(&engine->openmp, threads, run_all, &run);
    return 0;
}

void buddy_engine_free(Engine *engine)
{
    free(engine->memory);
    free(engine);
}

/* NULL where memory cannot be had. */
Engine *buddy_engine_new(const OpenMP *openmp)
{
    Engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return NULL;
    engine->openmp = *openmp;
#if HAS_TILES
    engine->has_tiles = may_use_tiles();
#endif
    return engine;
}
