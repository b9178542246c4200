/* A share of a matrix's rows times any number of vectors, row by row. */

#ifndef BUDDY_MULTIPLY_H
#define BUDDY_MULTIPLY_H

#include "bytes.h"
#include "panels.h"
#include "whole.h"

#define FEW_VECTORS 16   /* for which packing rows takes longer than it gains */
#define ROWS_AT_ONCE 16  /* which stay in a near cache while all vectors pass */
#define NEAR_COLUMNS 768 /* of MOST_VECTORS vectors of floats that stay in the nearest cache */
#define FAR_VECTORS 6    /* of longer ones, which meet two rows at a time */

/* What products of a thread work in. */
static size_t scratch_floats(int columns)
{
    size_t panel = panel_floats(columns), whole = whole_floats(columns);
    return panel > whole ? panel : whole;
}

/* At most so many vectors at a time. */
static void multiply_some(
    const Matrix *matrix, const Vector *x, int count, int most, int begin, int end, float *const *y)
{
    for (int row = begin, stop; row < end; row = stop) {
        stop = row + ROWS_AT_ONCE < end ? row + ROWS_AT_ONCE : end;
        for (int done = 0, now; done < count; done += now) {
            now = count - done < most ? count - done : most;
            multiply_few(matrix, x + done, now, row, stop, y + done);
        }
    }
}

/* What it calls is not inlined: GCC 12 makes the products of eight vectors a quarter slower here.
 *
 * y[n][row] = matrix[row] . x[n] + bias[row] for rows from begin to end; `scratch` is of as many
 * floats as scratch_floats says. */
static void multiply_rows(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    int is_narrow = HAS_BF16_DOT && matrix->by_dots && matrix->format == BFLOAT16;
    int is_near = is_narrow || matrix->columns <= NEAR_COLUMNS;
    int most = is_near ? MOST_VECTORS : FAR_VECTORS;
    if (matrix->by_dots && matrix->format >= INT8 && matrix->columns <= MOST_COLUMNS)
        multiply_whole(matrix, x, count, begin, end, y, scratch);
    else if (count <= most)
        multiply_few(matrix, x, count, begin, end, y);
    else if (is_narrow || count <= FEW_VECTORS)
        multiply_some(matrix, x, count, most, begin, end, y);
    else
        multiply_panels(matrix, x, count, begin, end, y, scratch);
    if (matrix->bias != NULL)
        for (int n = 0; n < count; n++)
            for (int at = begin; at < end; at++)
                y[n][at] += matrix->bias[at];
}

#endif
