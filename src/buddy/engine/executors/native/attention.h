/* Attention of lanes over the cache.
 *
 * The slots that a lane sees are attended in parts: what a part gives, its largest score, the sum of its
 * weights and its weighed values, is added to that of the parts before. So keys and values come from memory
 * once for all query heads that share them, threads share out the parts of few long rows, and numbers depend
 * neither on how many threads there are nor on other lanes.
 */

#ifndef BUDDY_ATTENTION_H
#define BUDDY_ATTENTION_H

#include "prompts.h"

/* Add what a part gave: the largest score, the sum of the weights, and the weighed values. */
static __attribute__((noinline)) void add_part(
    float *restrict state, const float *restrict part, int count, float scaling)
{
    float most = part[0] > state[0] ? part[0] : state[0];
    float before = state[0] == -INFINITY ? 0.0f : exp_of((state[0] - most) * scaling);
    float now = part[0] == -INFINITY ? 0.0f : exp_of((part[0] - most) * scaling);
    state[0] = most;
    for (size_t i = 1; i < state_floats(count); i++)
        state[i] = state[i] * before + part[i] * now;
}

static void end_state(const Run *run, const float *state, int lane, int head)
{
    int count = run->model->head_size;
    size_t at = ((size_t)lane * run->model->heads + head) * count;
    float *out = run->attended + at, scale = 1.0f / state[1];
    for (int i = 0; i < count; i++)
        out[i] = state[2 + i] * scale;
    narrow_for_products(run->model, out, run->attended_narrow + at, count);
}

/* Query heads of one lane that share a key head, as they meet keys. */
typedef struct {
    Vector vectors[MOST_TOGETHER];
    Sight sight;
    Matrix keys, values; /* of the slots that may be seen */
    int together;
} Asked;

/* Not inlined, so that its sums have one order wherever it is called. */
static __attribute__((noinline)) void ask(
    const Run *run, int block, int lane, int head, int together, float *wide, bf16 *narrowed, Asked *asked)
{
    const Model *model = run->model;
    int count = model->head_size, kv_head = head / (model->heads / model->kv_heads);
    const float *query = run->query + ((size_t)lane * model->heads + head) * count;
    size_t bytes = model->is_bf16 ? sizeof(bf16) : sizeof(float);
    Sight sight = sight_of(run, block, lane, kv_head);
    memcpy(wide, query, sizeof(float) * together * count);
    for (int n = 0; n < together; n++) {
        rotate(model, wide + n * count, model->blocks[block].query_norm, slot_of(run->step, lane));
        if (HAS_BF16_DOT && model->is_bf16)
            narrow_all(wide + n * count, narrowed + n * count, count);
        asked->vectors[n] = (Vector){wide + n * count, narrowed + n * count};
    }
    asked->sight = sight, asked->together = together;
    asked->keys = (Matrix){.weights = (const char *)run->cache->keys[block] + sight.base * bytes,
                           .rows = sight.slots, .columns = count, .by_dots = 1,
                           .format = model->is_bf16 ? BFLOAT16 : FLOAT32};
    asked->values = asked->keys;
    asked->values.weights = (const char *)run->cache->values[block] + sight.base * bytes;
}

/* A part of the slots; its state for each of the heads. */
static __attribute__((noinline)) void attend_part(
    const Run *run, const Own *own, const Asked *asked, int part, float *states)
{
    const Model *model = run->model;
    int count = model->head_size, from = part * SLOTS_AT_ONCE, together = asked->together;
    int to = from + SLOTS_AT_ONCE < asked->sight.slots ? from + SLOTS_AT_ONCE : asked->sight.slots;
    size_t bytes = model->is_bf16 ? sizeof(bf16) : sizeof(float);
    Matrix keys = asked->keys, values = asked->values;
    keys.weights = (const char *)keys.weights + (size_t)from * count * bytes;
    values.weights = (const char *)values.weights + (size_t)from * count * bytes;
    keys.rows = values.rows = to - from;
    float *scores[MOST_TOGETHER] = {0}, *out[MOST_TOGETHER] = {0};
    for (int n = 0; n < together; n++) {
        scores[n] = own->weights + n * SLOTS_AT_ONCE;
        out[n] = states + n * state_floats(count) + 2;
    }
    multiply_few(&keys, asked->vectors, together, 0, keys.rows, scores);
    for (int n = 0; n < together; n++) {
        Weighed made = weigh(&asked->sight, model->scaling, from, to, scores[n]);
        out[n][-2] = made.most, out[n][-1] = made.sum;
    }
    mix(&values, (const float *const *)scores, together, out);
}

static int first_part(const Sight *sight)
{
    return sight->oldest > 0 ? sight->oldest / SLOTS_AT_ONCE : 0;
}

static int parts_of(const Sight *sight)
{
    return (sight->slots - 1) / SLOTS_AT_ONCE + 1 - first_part(sight);
}

/* All parts of some heads that share a key head. */
static void attend(const Run *run, const Own *own, int block, int lane, int head, int together)
{
    int count = run->model->head_size;
    size_t each = state_floats(count);
    float wide[together * count], states[together * each], part[together * each];
    bf16 narrowed[together * count];
    Asked asked;
    ask(run, block, lane, head, together, wide, narrowed, &asked);
    int first = first_part(&asked.sight), parts = parts_of(&asked.sight);
    attend_part(run, own, &asked, first, states); /* as added to nothing */
    for (int at = first + 1; at < first + parts; at++) {
        attend_part(run, own, &asked, at, part);
        for (int n = 0; n < together; n++)
            add_part(states + n * each, part + n * each, count, run->model->scaling);
    }
    for (int n = 0; n < together; n++)
        end_state(run, states + n * each, lane, head + n);
}

/* How many heads are attended at once, and in how many turns all are that share a key head. */
static int heads_together(const Model *model)
{
    int sharing = model->heads / model->kv_heads, turns = (sharing - 1) / MOST_TOGETHER + 1;
    while (sharing % turns != 0)
        turns++;
    return sharing / turns;
}

/* Few lanes: threads share out their parts, then add them up. */
static void attend_apart(
    const Run *run, Team *team, int thread, const Own *own, int block, const int32_t *lanes, int count)
{
    const Model *model = run->model;
    int together = heads_together(model), turns = model->heads / together, total = 0, begin, end;
    size_t each = state_floats(model->head_size);
    int parts[count];
    for (int n = 0; n < count; n++) {
        Sight sight = sight_of(run, block, lanes[n], 0);
        total += (parts[n] = parts_of(&sight)) * turns;
    }
    share_of(total, 1, team, thread, &begin, &end);
    float wide[together * model->head_size];
    bf16 narrowed[together * model->head_size];
    for (int n = 0, first = 0; n < count; n++)
        for (int turn = 0; turn < turns; turn++, first += parts[n]) {
            int from = begin > first ? begin : first, to = end < first + parts[n] ? end : first + parts[n];
            if (from >= to)
                continue;
            Asked asked;
            ask(run, block, lanes[n], turn * together, together, wide, narrowed, &asked);
            for (int at = from; at < to; at++)
                attend_part(run, own, &asked, first_part(&asked.sight) + at - first,
                            run->states + at * together * each);
        }
    barrier(team);
    share_of(count * model->heads, 1, team, thread, &begin, &end);
    for (int n = 0, first = 0; n < count; n++)
        for (int head = 0; head < model->heads; head++) {
            int unit = n * model->heads + head;
            if (begin <= unit && unit < end) {
                float state[each];
                const float *part = run->states + (first * together + head % together) * each;
                memcpy(state, part, sizeof state);
                for (int at = 1; at < parts[n]; at++)
                    add_part(state, part + at * together * each, model->head_size, model->scaling);
                end_state(run, state, lanes[n], head);
            }
            if (head % together == together - 1)
                first += parts[n];
        }
}

static void attend_all(Run *run, Team *team, int thread, Own *own, int block, int count)
{
    const Model *model = run->model;
    const int32_t *lanes = own->active;
    int left = count, begin, end;
#if HAS_TILES || !HAS_BF16_DOT
    int32_t rest[count];
    left = attend_prompts(run, team, thread, own, block, count, rest);
    lanes = rest;
#endif
    int is_few = left <= lanes_apart(model, size_of(team)), has_parts = 0;
    for (int n = 0; is_few && n < left; n++) {
        Sight sight = sight_of(run, block, lanes[n], 0);
        has_parts |= parts_of(&sight) > 1;
    }
    if (has_parts) {
        attend_apart(run, team, thread, own, block, lanes, left);
        return;
    }
    int together = is_few ? 1 : heads_together(model), turns = model->heads / together;
    share_of(left * turns, 1, team, thread, &begin, &end);
    for (int unit = begin; unit < end; unit++)
        attend(run, own, block, lanes[unit / turns], unit % turns * together, together);
}

#endif
