/* Attention of prompts: many tokens of one row at once. */

#ifndef BUDDY_PROMPTS_H
#define BUDDY_PROMPTS_H

#include "softmax.h"
#include "values.h"

#if !HAS_BF16_DOT
/* Prompts are attended 16 lanes of one row at once, in the heads that share a key head: keys are a
 * matrix that all queries are multiplied with, and a value is widened once for three of them. */
#define PROMPT_LANES 16

static void attend_some(
    const Run *run, const Own *own, int block, const int32_t *lanes, int held, int kv_head)
{
    const Model *model = run->model;
    const Cache *cache = run->cache;
    int count = model->head_size, sharing = model->heads / model->kv_heads;
    int format = model->is_bf16 ? BFLOAT16 : FLOAT32, at_once = BLOCK_VECTORS / PROMPT_LANES;
    size_t bytes = model->is_bf16 ? sizeof(bf16) : sizeof(float);
    Sight last = sight_of(run, block, lanes[held - 1], kv_head); /* who sees most */
    Matrix keys = {.weights = (const char *)cache->keys[block] + last.base * bytes,
                   .rows = last.slots, .columns = count, .format = format};
    Matrix values = keys;
    values.weights = (const char *)cache->values[block] + last.base * bytes;
    for (int from = 0; from < sharing; from += at_once) {
        int heads = sharing - from < at_once ? sharing - from : at_once, queries = held * heads;
        Vector query[BLOCK_VECTORS];
        float *scores[BLOCK_VECTORS], *out[BLOCK_VECTORS], scales[BLOCK_VECTORS];
        for (int n = 0; n < queries; n++) {
            int lane = lanes[n / heads];
            size_t at = ((size_t)lane * model->heads + kv_head * sharing + from + n % heads) * count;
            rotate(model, run->query + at, model->blocks[block].query_norm,
                   slot_of(run->step, lane));
            query[n].wide = run->query + at;
            scores[n] = own->attention + (size_t)n * cache->capacity;
            out[n] = run->attended + at;
        }
        multiply_panels(&keys, query, queries, 0, keys.rows, scores, own->scratch);
        for (int n = 0; n < queries; n++) {
            Sight sight = sight_of(run, block, lanes[n / heads], kv_head);
            scales[n] = 1.0f / weigh(&sight, model->scaling, 0, sight.slots, scores[n]).sum;
            memset(scores[n] + sight.slots, 0, (keys.rows - sight.slots) * sizeof(float));
        }
        mix(&values, (const float *const *)scores, queries, out);
        for (int n = 0; n < queries; n++)
            for (int i = 0; i < count; i++)
                out[n][i] *= scales[n];
    }
}

static int attends_some(const Model *model)
{
    return model->head_size % WIDTH == 0;
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
    __m512 scale = _mm512_set1_ps(scaling);
    for (int slot = 0; slot < slots; slot++) {
        __m512 here = _mm512_loadu_ps(scores + (size_t)slot * TILE);
        __m512 x = _mm512_mul_ps(_mm512_sub_ps(here, most), scale);
        x = (__m512)exp_of_all((Floats)x);
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

#define PROMPT_LANES TILE

/* Attention of up to 16 lanes of one row, in the heads that share a key head. */
static void attend_some(
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

static int attends_some(const Model *model)
{
    return model->by_tiles && model->head_size % DEPTH == 0;
}
#endif

#if HAS_TILES || !HAS_BF16_DOT
/* Attend the rows that have many lanes here; the lanes of others come to the front of `rest`. */
static int attend_prompts(
    const Run *run, Team *team, int thread, const Own *own, int block, int count, int32_t *rest)
{
    const Model *model = run->model;
    int left = 0, unit = 0;
    for (int begin = 0, end; begin < count; begin = end) {
        int row = row_of(run->step, own->active[begin]);
        for (end = begin + 1; end < count && row_of(run->step, own->active[end]) == row;)
            end++;
        if (!attends_some(model) || end - begin < LEAST_OF_PROMPT) {
            for (int n = begin; n < end; n++)
                rest[left++] = own->active[n];
            continue;
        }
        for (int from = begin; from < end; from += PROMPT_LANES)
            for (int head = 0; head < model->kv_heads; head++)
                if (unit++ % size_of(team) == thread)
                    attend_some(run, own, block, own->active + from,
                                end - from < PROMPT_LANES ? end - from : PROMPT_LANES, head);
    }
    return left;
}
#endif

#endif
