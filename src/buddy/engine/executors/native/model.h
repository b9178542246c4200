/* What Python describes: the model's weights, a session's cache, one step. Layouts as in library.py. */

#ifndef BUDDY_MODEL_H
#define BUDDY_MODEL_H

#include "matrix.h"

typedef struct {
    Matrix query, key, value, output, gate, up, down;
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_size] or NULL */
    int32_t window;                         /* tokens that attention sees; 0 = all */
} Block;

typedef struct {
    const Block *blocks;
    const void *embedding; /* [vocab, hidden] */
    const float *final_norm;
    Matrix vocabulary; /* the output projection */
    const float *cosines, *sines; /* [positions, head_size] */
    float epsilon, scaling;
    int32_t num_blocks, hidden, heads, kv_heads, head_size, inner;
    int32_t is_bf16; /* number format of embedding, cache and passed residuals; else float32 */
} Model;

/* Of a session. */
typedef struct {
    void *const *keys, *const *values;  /* by block: [rows, kv heads, capacity, head_size] */
    const uint8_t *valid;               /* [rows, capacity], 0 = pad; NULL = no pads */
    uint8_t *const *hidden_slots;       /* by block: [rows, capacity] or NULL; 1 = nobody sees it */
    int32_t *waiting;                   /* [blocks, rows, capacity]: place in `passed`, or -1 */
    int32_t *filled;                    /* [blocks, rows]: no earlier slot waits */
    const int64_t *positions;           /* [rows, capacity] */
    void *passed;                       /* [places, hidden]: residuals that passed blocks by */
    int32_t num_passed, capacity, rows;
} Cache;

/* What a skipped block leaves: nothing, its residual, or keys and values made of it at once. */
enum { NOTHING = 0, RESIDUAL = 1, PROJECTED = 2 };

/* A lane is one new token of one row. Lanes of a row stand together, in the order of their slots, and
 * run the same blocks. */
typedef struct {
    const int64_t *tokens;           /* [lanes]; read where the first block is 0 */
    const uint8_t *runs;             /* [lanes, blocks], 1 = the lane runs the block */
    float *residual;                 /* [lanes, hidden], in and out */
    float *logits;                   /* [lanes, vocab], or NULL for none */
    int64_t *executed;               /* [lanes], counted where blocks ran */
    double *seconds;                 /* [3] added to: in blocks, filling, output projection; or NULL */
    int32_t lanes, columns, start;   /* columns: new tokens of a row; start: slot of the first */
    int32_t first, stop;             /* blocks from first to stop - 1 */
    int32_t leaves;
} Step;

#endif
