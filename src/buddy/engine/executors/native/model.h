/* What Python describes: the model's weights, a session's cache, one step. Layouts as in layout.py. */

#ifndef BUDDY_MODEL_H
#define BUDDY_MODEL_H

#include "multiply.h"
#include "tiles.h"

typedef struct {
    Matrix query, key, value, output, gate, up, down;
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_size] or NULL */
    int32_t window;                         /* tokens that attention sees; 0 = all */
} Block;

typedef struct {
    const Block *blocks;
    Matrix embedding; /* in INT8 or INT8_GROUPS it is the output projection */
    const float *final_norm;
    Matrix vocabulary; /* the output projection */
    const float *cosines, *sines; /* [positions, head_size] */
    float epsilon, scaling;
    int32_t num_blocks, hidden, heads, kv_heads, head_size, inner;
    int32_t by_tiles; /* whether tiles make all products, which makes prompts too the kernel's */
    int32_t is_bf16; /* number format of what is embedded, cache and kept residuals; else float32 */
    int32_t rank;    /* of adapters that know the depth; 0 = there are none, and no tiles if there are */
    int32_t depths;  /* that they know: deeper is as the last */
} Model;

/* Of a session. A token's slot is its position. */
typedef struct {
    void *const *keys, *const *values;  /* by block: [rows, kv heads, capacity, head_size] */
    uint8_t *const *hidden_slots;       /* by block: [rows, capacity]; 1 = nobody sees it; or NULL */
    int32_t *waiting;                   /* [blocks, rows, capacity]: place in `skipped`, or -1 */
    int32_t *filled;                    /* [blocks, rows]: no earlier slot waits */
    void *skipped;                      /* [places, hidden]: residuals of tokens that skipped blocks */
    int32_t num_skipped, capacity, rows;
} Cache;

/* What a skipped block leaves: zeros, a slot that nobody sees, its residual, or keys and values made of
 * it at once. */
enum { ZEROS = 0, HIDDEN = 1, RESIDUAL = 2, PROJECTED = 3 };

/* A lane is one new token of one sequence. Lanes of a sequence stand side by side, in the order of their
 * slots; each runs blocks of its own. */
typedef struct {
    const int64_t *tokens;           /* [lanes]; read where the first block is 0 */
    const int32_t *row, *slot;       /* [lanes]: where the lane stands in the cache */
    const uint8_t *runs;             /* [lanes, blocks], 1 = the lane runs the block */
    float *residual;                 /* [lanes, hidden], in and out */
    float *logits;                   /* [lanes, words], or NULL for none */
    int64_t *executed;               /* [lanes], counted where blocks ran */
    double *seconds;                 /* [3] added to: in blocks, filling, output projection; or NULL */
    int32_t lanes;
    int32_t first, stop;             /* blocks from first to stop - 1 */
    int32_t leaves;
    int32_t shares_rows;             /* 1 = some lanes are of one sequence */
    int32_t words;                   /* token ids that get logits: 0 to words - 1 */
} Step;

#endif
