/* A share of a matrix's rows times any number of vectors, row by row. */

#ifndef BUDDY_MULTIPLY_H
#define BUDDY_MULTIPLY_H

#include "matrix.h"

/* y[n][row] = matrix[row] . x[n] + bias[row] for rows from begin to end. */
static void multiply_rows(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y)
{
    if (count <= MOST_VECTORS) {
        multiply_few(matrix, x, count, begin, end, y);
    } else {
        for (int row = begin; row < end; row += ROWS_AT_ONCE) {
            int stop = row + ROWS_AT_ONCE < end ? row + ROWS_AT_ONCE : end;
            for (int done = 0; done < count; done += MOST_VECTORS) {
                int now = count - done < MOST_VECTORS ? count - done : MOST_VECTORS;
                multiply_few(matrix, x + done, now, row, stop, y + done);
            }
        }
    }
    if (matrix->bias != NULL)
        for (int n = 0; n < count; n++)
            for (int at = begin; at < end; at++)
                y[n][at] += matrix->bias[at];
}

#endif
