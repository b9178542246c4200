/* A share of a matrix's rows times any number of vectors, row by row. */

#ifndef BUDDY_MULTIPLY_H
#define BUDDY_MULTIPLY_H

#include "matrix.h"

/* Of more vectors than MOST_VECTORS, blocks of BLOCK_VECTORS stay in a core's own cache while rows
 * pass, which are widened once for all of them, and meet them in panels of as many sums as there are
 * registers for. */
#define BLOCK_VECTORS 64
#define PANEL_VECTORS 4
#define PANEL_ROWS 3
#define SCRATCH 36864 /* floats of widened rows, that many or one panel's */

#define ROWS_AT_ONCE 16 /* of bfloat16, which stay in a near cache while all vectors pass */

static size_t scratch_floats(int columns)
{
    return columns > SCRATCH / PANEL_ROWS ? (size_t)columns * PANEL_ROWS : SCRATCH;
}

/* One row of a matrix, widened; of INT8 without its scale. */
static void widen_row(const Matrix *matrix, int row, float *out)
{
    int column = 0, columns = matrix->columns;
    Floats w;
    for (; column + WIDTH <= columns; column += WIDTH) {
        switch (matrix->format) {
        case FLOAT32:
            w = widened(matrix, FLOAT32, row, column);
            break;
        case BFLOAT16:
            w = widened(matrix, BFLOAT16, row, column);
            break;
        case INT8:
            w = widened(matrix, INT8, row, column);
            break;
        default:
            w = widened(matrix, INT4, row, column);
        }
        memcpy(out + column, &w, sizeof w);
    }
    if (column < columns) {
        w = rest_of_row(matrix, matrix->format, row, column, columns - column);
        memcpy(out + column, &w, sizeof(float) * (columns - column));
    }
}

static void multiply_block(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    int columns = matrix->columns, most = (int)(scratch_floats(columns) / columns);
    most -= most % PANEL_ROWS;
    float *to[BLOCK_VECTORS];
    for (int first = begin, stop; first < end; first = stop) {
        stop = first + most < end ? first + most : end;
        Matrix wide = {.weights = scratch, .columns = columns, .format = FLOAT32};
        for (int row = first; row < stop; row++)
            widen_row(matrix, row, scratch + (size_t)(row - first) * columns);
        for (int n = 0; n < count; n++)
            to[n] = y[n] + first;
        int n = 0, rows = stop - first;
        for (; n + PANEL_VECTORS <= count; n += PANEL_VECTORS) {
            int row = 0;
            for (; row + PANEL_ROWS <= rows; row += PANEL_ROWS)
                block_wide(&wide, FLOAT32, PANEL_ROWS, x + n, PANEL_VECTORS, to + n, row);
            for (; row < rows; row++)
                block_wide(&wide, FLOAT32, 1, x + n, PANEL_VECTORS, to + n, row);
        }
        if (n < count)
            multiply_few(&wide, x + n, count - n, 0, rows, to + n);
        if (matrix->format == INT8)
            for (n = 0; n < count; n++)
                for (int row = first; row < stop; row++)
                    y[n][row] *= matrix->scales[row];
    }
}

#if HAS_BF16_DOT
/* Of more than MOST_VECTORS vectors, by dot products of bfloat16. */
static void multiply_dots(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    int columns = matrix->columns, fit = (int)(2 * scratch_floats(columns) / columns);
    int most = matrix->format == BFLOAT16 || fit >= ROWS_AT_ONCE ? ROWS_AT_ONCE : fit - fit % 2;
    Matrix narrow = {.weights = scratch, .columns = columns, .format = BFLOAT16, .by_dots = 1};
    float *to[MOST_VECTORS];
    for (int row = begin, stop; row < end; row = stop) {
        stop = row + most < end ? row + most : end;
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

/* y[n][row] = matrix[row] . x[n] + bias[row] for rows from begin to end; `scratch` is of as many
 * floats as scratch_floats says, of more than MOST_VECTORS vectors alone. */
static void multiply_rows(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *scratch)
{
    if (count <= MOST_VECTORS)
        multiply_few(matrix, x, count, begin, end, y);
#if HAS_BF16_DOT
    else if (matrix->by_dots)
        multiply_dots(matrix, x, count, begin, end, y, scratch);
#endif
    else
        for (int done = 0, now; done < count; done += now) {
            now = count - done < BLOCK_VECTORS ? count - done : BLOCK_VECTORS;
            multiply_block(matrix, x + done, now, begin, end, y + done, scratch);
        }
    if (matrix->bias != NULL)
        for (int n = 0; n < count; n++)
            for (int at = begin; at < end; at++)
                y[n][at] += matrix->bias[at];
}

#endif
