/* One decode step of a Llama-like model under a plan: all its blocks in one call.
 *
 * Every thread walks the same blocks and does its share of each stage; a barrier ends a stage. A
 * lane that skips a block costs nothing there: the lanes that run it are a list of pointers, and
 * nothing is gathered or scattered. Source: the block is that of Llama, Mistral, Qwen2 and Qwen3 as
 * transformers computes it; engine/run.py is the reference.
 */

#include <time.h>

#include "attention.h"
#include "skipped.h"

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
    Matrix vocabulary = model->vocabulary;
    vocabulary.rows = step->words;
    project(run, team, thread, own, rows, model->final_norm, step->lanes, 1,
            (const Matrix *[]){&vocabulary}, (float *[]){step->logits}, 1);
}

static void run_all(void *argument, Team *team, int thread)
{
    Run *run = argument;
    const Model *model = run->model;
    const Step *step = run->step;
    Own own = {0};
    int32_t place[step->lanes];
    lay_out_own(run, run->own + thread * run->own_bytes, &own);
    for (int lane = 0; lane < step->lanes; lane++) {
        place[lane] = -1;
        if (thread == 0 && step->first == 0)
            embed(model, step->tokens[lane], step->residual + (size_t)lane * model->hidden);
        if (thread == 0 && model->rank > 0 && step->runs != NULL)
            run->depth[lane] = known_depth(run, lane);
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
    run->attended_narrow = take(&at, NARROW_BYTES * lanes * attended);
    if (model->by_tiles) {
        size_t held = (lanes + 15) / 16 * 16; /* whole panels */
        run->normed_panels = take(&at, sizeof(bf16) * held * model->hidden);
        run->attended_panels = take(&at, sizeof(bf16) * held * attended);
        run->inner_panels = take(&at, sizeof(bf16) * held * model->inner);
        size_t most = widest > (size_t)model->inner ? widest : (size_t)model->inner;
        run->byte_panels = take(&at, sizeof(bf16) * held * most);
    }
    size_t held = lanes_by_rows(model, step), shared = lanes > HOLES_AT_ONCE ? held * model->hidden : 0;
    run->normed = take(&at, sizeof(float) * shared);
    run->normed_narrow = take(&at, NARROW_BYTES * shared);
    run->inner = take(&at, sizeof(float) * held * model->inner);
    run->inner_narrow = take(&at, NARROW_BYTES * held * model->inner);
    run->low = take(&at, sizeof(float) * 2 * lanes * model->rank);
    run->depth = take(&at, model->rank > 0 ? sizeof(int32_t) * lanes : 0);
    size_t apart = lanes_apart(model, threads), parts = (size_t)run->cache->capacity / SLOTS_AT_ONCE + 1;
    apart = apart < lanes ? apart : lanes;
    run->states =
        take(&at, sizeof(float) * apart * parts * model->heads * state_floats(model->head_size));
    run->own = at;
    run->own_bytes = lay_out_own(run, NULL, &own);
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
    Run run = {.model = model, .cache = cache, .step = step};
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
