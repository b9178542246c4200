/* A share of a matrix's rows times any number of vectors, row by row. */

#ifndef BUDDY_MULTIPLY_H
#define BUDDY_MULTIPLY_H

#include "panels.h"
#include "whole.h"

#define ROWS_AT_ONCE 16 /* of bfloat16, which stay in a near cache while all vectors pass */

/* What products of a thread work in. */
static size_t scratch_floats(int columns)
{
    size_t panel = panel_floats(columns), whole = HAS_BF16_DOT ? 0 : whole_floats(columns);
    return panel > whole ? panel : whole;
}

#if HAS_BF16_DOT
/* Of more than MOST_VECTORS vectors, by dot products of bfloat16. */
static void multiply_dots(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    int columns = matrix->columns;
    Matrix narrow = {.weights = scratch, .columns = columns, .format = BFLOAT16, .by_dots = 1};
    float *to[MOST_VECTORS];
    for (int row = begin, stop; row < end; row = stop) {
        stop = row + ROWS_AT_ONCE < end ? row + ROWS_AT_ONCE : end;
        if (matrix->format == BFLOAT16)
            narrow.weights = (const bf16 *)matrix->weights + (size_t)row * columns;
        else
            narrow_rows(matrix, row, stop, (bf16 *)scratch);
        if (matrix->format == INT8)
            narrow.scales = matrix->scales + row;
        for (int done = 0, now; done < count; done += now) {
            now = count - done < MOST_VECTORS ? count - done : MOST_VECTORS;
            for (int n = 0; n < now; n++)
                to[n] = y[done + n] + row;
            multiply_few(&narrow, x + done, now, 0, stop - row, to);
        }
    }
}
#endif

/* What it calls is not inlined: GCC 12 makes the products of eight vectors a quarter slower here.
 *
 * y[n][row] = matrix[row] . x[n] + bias[row] for rows from begin to end; `scratch` is of as many
 * floats as scratch_floats says. */
static void multiply_rows(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    if (!HAS_BF16_DOT && matrix->by_dots && matrix->format >= INT8)
        multiply_whole(matrix, x, count, begin, end, y, scratch);
    else if (count <= MOST_VECTORS)
        multiply_few(matrix, x, count, begin, end, y);
#if HAS_BF16_DOT
    else if (matrix->by_dots)
        multiply_dots(matrix, x, count, begin, end, y, scratch);
#endif
    else
        multiply_panels(matrix, x, count, begin, end, y, scratch);
    if (matrix->bias != NULL)
        for (int n = 0; n < count; n++)
            for (int at = begin; at < end; at++)
                y[n][at] += matrix->bias[at];
}

#endif
