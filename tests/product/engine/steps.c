/* Random steps of a random model, whose residuals and logits are printed: what one instruction set
 * makes of them can be held against another, on whatever machine or emulator this runs. */

#ifndef PLAIN
#define PLAIN 0 /* products of floats, which round nothing */
#endif
#include <pthread.h>
#include <stdio.h>

#include "decode.c"

enum { BLOCKS = 5, HIDDEN_SIZE = 256, HEADS = 4, KV_HEADS = 2, HEAD = 64, INNER = 256, VOCAB = 80 };
enum { ROWS = 3, CAPACITY = 48, STEPS = 7, THREADS = 2 };

static uint32_t state = 1;

/* From -1 to 1, the same everywhere. */
static float number(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)(state >> 8) / (float)(1 << 23) - 1.0f;
}

static int below(int limit)
{
    return (int)((number() + 1) * 0.5f * (float)limit) % limit;
}

static void *room(size_t bytes)
{
    void *here = NULL;
    if (posix_memalign(&here, 64, (bytes + 63) / 64 * 64) != 0)
        exit(2);
    memset(here, 0, bytes);
    return here;
}

static float *floats(int count, float center, float spread)
{
    float *made = room(sizeof(float) * count);
    for (int i = 0; i < count; i++)
        made[i] = center + spread * number();
    return made;
}

static int is_of_bf16; /* the model that is made */

static Matrix matrix(int rows, int columns, int format, int has_bias)
{
    Matrix made = {.rows = rows, .columns = columns, .format = format,
                   .by_dots = !PLAIN && is_of_bf16 && format != FLOAT32};
    size_t count = (size_t)rows * columns;
    made.bias = has_bias ? floats(rows, 0, 0.1f) : NULL;
    float *weights = floats((int)count, 0, 0.1f);
    if (format == BFLOAT16) {
        bf16 *small = room(sizeof(bf16) * count);
        narrow_all(weights, small, (int)count);
        made.weights = small;
    } else if (format == FLOAT32) {
        made.weights = weights;
    } else {
        uint8_t *bytes = room(count);
        for (size_t i = 0; i < count; i++)
            bytes[i] = (uint8_t)(below(255) + 1);
        made.weights = bytes;
        float scale = format == INT8 ? 0.0008f : 0.007f;
        made.scales = floats(format == INT8 ? rows : (int)count / GROUP, scale, scale / 2);
        if (format <= INT8_GROUPS)
            return made;
        made.minimums = room(sizeof(float) * (count / GROUP));
        float *units = floats((int)count / GROUP / SUPER * 2, 0.0002f, 0.00007f);
        for (size_t i = MINIMUM; i < count / GROUP / SUPER * 2; i += 2)
            units[i] *= -1.85f; /* so that weights are 0 on average */
        made.units = units;
        for (size_t i = 0; i < count / GROUP; i++)
            if (format == INT4_HALVES) {
                ((uint16_t *)made.scales)[i] = (uint16_t)(0x1d00 + below(512)); /* about 0.006 */
                ((uint16_t *)made.minimums)[i] = (uint16_t)(0xa900 + below(512)); /* about -0.05 */
            } else {
                ((uint8_t *)made.scales)[i] = (uint8_t)below(64);
                ((uint8_t *)made.minimums)[i] = (uint8_t)below(256);
            }
    }
    return made;
}

static Model model_of(int format, int is_bf16, int has_tiles)
{
    is_of_bf16 = is_bf16;
    Block *blocks = room(sizeof(Block) * BLOCKS);
    for (int b = 0; b < BLOCKS; b++)
        blocks[b] = (Block){
            .query = matrix(HEADS * HEAD, HIDDEN_SIZE, format, 1),
            .key = matrix(KV_HEADS * HEAD, HIDDEN_SIZE, format, 1),
            .value = matrix(KV_HEADS * HEAD, HIDDEN_SIZE, format, 0),
            .output = matrix(HIDDEN_SIZE, HEADS * HEAD, format, 0),
            .gate = matrix(INNER, HIDDEN_SIZE, format, 0),
            .up = matrix(INNER, HIDDEN_SIZE, format, 0),
            .down = matrix(HIDDEN_SIZE, INNER, format, 0),
            .attention_norm = floats(HIDDEN_SIZE, 1, 0.2f),
            .mlp_norm = floats(HIDDEN_SIZE, 1, 0.2f),
            .query_norm = b % 2 ? floats(HEAD, 1, 0.2f) : NULL,
            .key_norm = b % 2 ? floats(HEAD, 1, 0.2f) : NULL,
            .window = b == 3 ? 7 : 0,
        };
    float *angles = floats(2 * CAPACITY * HEAD, 0, 1);
    Matrix words = matrix(VOCAB, HIDDEN_SIZE, is_bf16 ? BFLOAT16 : FLOAT32, 0);
    return (Model){
        .blocks = blocks, .embedding = words, .final_norm = floats(HIDDEN_SIZE, 1, 0.2f),
        .vocabulary = words, .cosines = angles, .sines = angles + CAPACITY * HEAD,
        .epsilon = 1e-5f, .scaling = 0.1f, .num_blocks = BLOCKS, .hidden = HIDDEN_SIZE,
        .heads = HEADS, .kv_heads = KV_HEADS, .head_size = HEAD, .inner = INNER,
        .by_tiles = has_tiles && is_bf16, .is_bf16 = is_bf16,
    };
}

/* OpenMP in the kernel's eyes, by threads of our own. */
static _Thread_local int own_number;
static int team_size;
static void (*team_work)(void *);

static int thread_number(void)
{
    return own_number;
}

static int threads_now(void)
{
    return team_size;
}

typedef struct {
    int number;
    void *argument;
} Start;

static void *begin(void *given)
{
    own_number = ((Start *)given)->number;
    team_work(((Start *)given)->argument);
    return NULL;
}

static void parallel(void (*work)(void *), void *argument, unsigned threads, unsigned flags)
{
    (void)flags;
    pthread_t made[THREADS];
    Start starts[THREADS];
    team_work = work, team_size = (int)threads;
    for (unsigned n = 0; n < threads; n++) {
        starts[n] = (Start){(int)n, argument};
        if (pthread_create(&made[n], NULL, begin, &starts[n]) != 0)
            exit(2);
    }
    for (unsigned n = 0; n < threads; n++)
        pthread_join(made[n], NULL);
}

static void show(const char *what, const float *x, int count)
{
    printf("%s", what);
    for (int i = 0; i < count; i++)
        printf(" %.9g", x[i]);
    printf("\n");
}

/* Rows join at their own times, each step adds one to three tokens of each, plans are drawn anew. */
static void session(Engine *engine, const Model *model, int leaves)
{
    void *keys[BLOCKS], *values[BLOCKS];
    uint8_t *hidden[BLOCKS];
    size_t slots = (size_t)ROWS * CAPACITY;
    for (int b = 0; b < BLOCKS; b++) {
        keys[b] = room(slots * KV_HEADS * HEAD * sizeof(float));
        values[b] = room(slots * KV_HEADS * HEAD * sizeof(float));
        hidden[b] = room(slots);
    }
    Cache cache = {
        .keys = keys, .values = values, .hidden_slots = leaves == HIDDEN ? hidden : NULL,
        .waiting = room(sizeof(int32_t) * BLOCKS * slots),
        .filled = room(sizeof(int32_t) * BLOCKS * ROWS),
        .skipped = room(sizeof(float) * slots * BLOCKS * HIDDEN_SIZE),
        .capacity = CAPACITY, .rows = ROWS,
    };
    memset(cache.waiting, 0xff, sizeof(int32_t) * BLOCKS * slots);
    int length[ROWS] = {0};
    for (int at = 0; at < STEPS; at++) {
        int64_t tokens[3 * ROWS], executed[3 * ROWS] = {0};
        int32_t row[3 * ROWS], slot[3 * ROWS];
        uint8_t runs[3 * ROWS * BLOCKS];
        float residual[3 * ROWS * HIDDEN_SIZE], logits[3 * ROWS * VOCAB];
        int lanes = 0;
        for (int r = 0; r <= at && r < ROWS; r++)
            for (int more = 1 + below(3); more > 0; more--, lanes++) {
                tokens[lanes] = below(VOCAB), row[lanes] = r, slot[lanes] = length[r]++;
                for (int b = 0; b < BLOCKS; b++)
                    runs[lanes * BLOCKS + b] = b == 0 || b == BLOCKS - 1 || below(2);
            }
        Step step = {
            .tokens = tokens, .row = row, .slot = slot, .runs = runs, .residual = residual,
            .logits = logits, .executed = executed, .lanes = lanes, .first = 0, .stop = BLOCKS,
            .leaves = leaves, .shares_rows = 1, .words = VOCAB,
        };
        if (buddy_step(engine, THREADS, model, &cache, &step) != 0)
            exit(2);
        show("residual", residual, lanes * HIDDEN_SIZE);
        show("logits", logits, lanes * VOCAB);
    }
}

int main(void)
{
    const OpenMP openmp = {parallel, thread_number, threads_now};
    Engine *engine = buddy_engine_new(&openmp);
    for (int format = FLOAT32; format <= INT4_BYTES; format++)
        for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
            if ((format <= BFLOAT16 && is_bf16 != (format == BFLOAT16)) || format == INT8_GROUPS)
                continue; /* tiles do not read the latter */
            Model model = model_of(format, is_bf16, buddy_has_tiles(engine));
            for (int leaves = ZEROS; leaves <= PROJECTED; leaves++) {
                printf("format %d, bf16 %d, leaves %d\n", format, is_bf16, leaves);
                session(engine, &model, leaves);
            }
        }
    buddy_engine_free(engine);
    return 0;
}
