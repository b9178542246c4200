/* A share of a matrix's rows times any number of vectors, by the fastest way this machine has. */

#ifndef BUDDY_MULTIPLY_H
#define BUDDY_MULTIPLY_H

#include "matrix.h"
#include "tiles.h"

/* Bytes that `multiply_rows` works in. */
static size_t multiply_bytes(int columns, int count)
{
    size_t row = sizeof(float) * columns, tiles = tile_bytes(columns, count);
    return row > tiles ? row : tiles;
}

/* y[n][row] = matrix[row] . x[n] + bias[row] for rows from begin to end. */
static void multiply_rows(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    int has_tiles, void *memory)
{
    int row = begin;
#if HAS_TILES
    if (has_tiles && matrix->format == BFLOAT16 && matrix->columns % DEPTH == 0)
        row = rows_by_tiles(matrix, x, count, begin, end, y, memory);
#else
    (void)has_tiles;
#endif
    if (count <= MOST_VECTORS) {
        multiply_few(matrix, x, count, row, end, y, memory);
    } else {
        for (; row < end; row += ROWS_AT_ONCE) {
            int stop = row + ROWS_AT_ONCE < end ? row + ROWS_AT_ONCE : end;
            for (int done = 0; done < count; done += MOST_VECTORS) {
                int now = count - done < MOST_VECTORS ? count - done : MOST_VECTORS;
                multiply_few(matrix, x + done, now, row, stop, y + done, memory);
            }
        }
    }
    if (matrix->bias != NULL)
        for (int n = 0; n < count; n++)
            for (int at = begin; at < end; at++)
                y[n][at] += matrix->bias[at];
}

#endif
