/* What a skipped block leaves in the cache, and how its holes are filled when the block next runs. */

#ifndef BUDDY_SKIPPED_H
#define BUDDY_SKIPPED_H

#include "products.h"

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

#endif
