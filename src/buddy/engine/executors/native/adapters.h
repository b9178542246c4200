/* Adapters that know the depth: what they add to products with the matrices that they were merged into.
 *
 * A matrix W has such an adapter merged at a scale of 1. Other scales add U (d * D x), where d is how far
 * the scale of each rank is from 1 at the depth of x. Threads share the rows of D, wait for each other,
 * and add their own rows of U where they made those of W x. */

#ifndef BUDDY_ADAPTERS_H
#define BUDDY_ADAPTERS_H

#include "run.h"

/* Blocks that a lane runs in all, or as many as the adapters know. */
static int32_t known_depth(const Run *run, int lane)
{
    int blocks = run->model->num_blocks, most = run->model->depths - 1, depth = 0;
    for (int block = 0; block < blocks; block++)
        depth += run->step->runs[(size_t)lane * blocks + block];
    return depth < most ? depth : most;
}

static __attribute__((noinline)) void lower_share(
    const Run *run, Team *team, int thread, const Own *own, const int32_t *lanes, int count,
    const Matrix *matrix, float *low)
{
    int begin, end, rank = run->model->rank;
    float *outputs[count];
    share_of(rank, 1, team, thread, &begin, &end);
    for (int n = 0; n < count; n++)
        outputs[n] = low + (size_t)n * rank;
    multiply_rows(matrix->down, own->vectors, count, begin, end, outputs, own->scratch);
    for (int n = 0; n < count; n++) {
        const float *deviations = matrix->deviations + (size_t)run->depth[lanes[n]] * rank;
        for (int k = begin; k < end; k++)
            outputs[n][k] *= deviations[k];
    }
}

/* D x of some lanes, scaled, for matrices that read the same vectors; those that have no adapter are
 * passed by. All threads have all of it at the end. */
static void lower(
    const Run *run, Team *team, int thread, const Own *own, const int32_t *lanes, int count,
    const Matrix *const *matrices, int number)
{
    if (matrices[0]->down == NULL)
        return;
    for (int i = 0; i < number; i++)
        lower_share(run, team, thread, own, lanes, count, matrices[i],
                    run->low + (size_t)i * count * run->model->rank);
    barrier(team);
}

/* Add U to rows from begin to end of a product. */
static __attribute__((noinline)) void raise_rows(
    const Run *run, const Matrix *matrix, const float *low, int count, int begin, int end,
    float *const *y)
{
    if (matrix->down == NULL)
        return;
    int rank = run->model->rank, is_bf16 = matrix->down->format == BFLOAT16;
    for (int n = 0; n < count; n++)
        for (int k = 0; k < rank; k++) {
            float *restrict out = y[n], by = low[(size_t)n * rank + k];
            size_t row = (size_t)k * matrix->rows;
            const bf16 *restrict narrow_up = (const bf16 *)matrix->up + row;
            const float *restrict wide_up = (const float *)matrix->up + row;
            if (is_bf16)
                for (int i = begin; i < end; i++)
                    out[i] += by * widen(narrow_up[i]);
            else
                for (int i = begin; i < end; i++)
                    out[i] += by * wide_up[i];
        }
}

/* The same of a thread's share of all rows. */
static void raise_share(
    const Run *run, Team *team, int thread, const Matrix *matrix, const float *low, int count,
    float *const *y)
{
    int begin, end;
    share_of(matrix->rows, TILE, team, thread, &begin, &end);
    raise_rows(run, matrix, low, count, begin, end, y);
}

#endif
