/* What a lane sees, and its scores as weights. */

#ifndef BUDDY_SOFTMAX_H
#define BUDDY_SOFTMAX_H

#include "rounding.h"
#include "run.h"

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

/* e^x for x <= 0 as exp_of, and 0 below -87. */
static inline Floats exp_of_all(Floats x)
{
    Ints counts = ~(x < -87.0f); /* what is no number too */
    Floats shifted = x * 1.44269504f + SHIFT;
    AS_IT_IS(shifted);
    Floats whole = shifted - SHIFT;
    AS_IT_IS(whole);
    Floats rest = x - whole * 0.693359375f;
    AS_IT_IS(rest);
    rest += whole * 2.12194440e-4f;
    Floats p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    Ints power = ((Ints)shifted << 23) + (127 << 23); /* of two: the last bits of `shifted` are `whole` */
    return (Floats)((Ints)(p * (Floats)power) & counts);
}

static inline Floats larger_of(Floats a, Floats b)
{
    Ints first = a > b;
    return (Floats)(((Ints)a & first) | ((Ints)b & ~first));
}

/* Some of a few numbers, and behind them what counts for nothing. */
static inline Floats scores_at(const float *from, int left)
{
    Floats here = (Floats){0} - INFINITY;
    if (left >= WIDTH)
        memcpy(&here, from, sizeof here);
    else
        memcpy(&here, from, sizeof(float) * left);
    return here;
}

typedef struct {
    float most, sum; /* the largest score, and the sum of the weights */
} Weighed;

/* Scores of the slots from `from` to `to` - 1 to weights, in place: e to the power of what each, scaled, is
 * above the largest. */
static __attribute__((noinline)) Weighed weigh(
    const Sight *sight, float scaling, int from, int to, float *restrict weights)
{
    int count = to - from, others = sight->slots - 1 < to ? sight->slots - 1 : to; /* it sees itself */
    if (sight->hides != NULL || sight->oldest > from)
        for (int slot = from; slot < others; slot++)
            if ((sight->hides != NULL && sight->hides[slot]) || slot < sight->oldest)
                weights[slot - from] = -INFINITY;
    Floats most = (Floats){0} - INFINITY, sum = {0};
    for (int i = 0; i < count; i += WIDTH)
        most = larger_of(scores_at(weights + i, count - i), most);
    float each[WIDTH];
    memcpy(each, &most, sizeof each);
    Weighed made = {-INFINITY, 0};
    for (int i = 0; i < WIDTH; i++)
        made.most = each[i] > made.most ? each[i] : made.most;
    float above = made.most == -INFINITY ? 0.0f : made.most; /* where none is seen, weights are 0 */
    for (int i = 0; i < count; i += WIDTH) {
        int left = count - i;
        Floats x = exp_of_all((scores_at(weights + i, left) - above) * scaling);
        if (left >= WIDTH)
            memcpy(weights + i, &x, sizeof x);
        else
            memcpy(weights + i, &x, sizeof(float) * left);
        sum += x;
    }
    totals_of(&sum, 1, &made.sum);
    return made;
}

#endif
