/* A share of a matrix's rows times many vectors, at the pace of the processor's floats.
 *
 * Rows are widened and packed so that those of a panel lie side by side, and a panel meets six vectors
 * at a time: each number that is loaded is used in as many sums as there are registers for. Column c of
 * a row is added to sum c % WIDTH, one such sum of a panel's rows after another, and these are added in
 * the order of totals_of. So a product has the bits that block_wide gives it.
 */

#ifndef BUDDY_PANELS_H
#define BUDDY_PANELS_H

#include "matrix.h"
#include "transpose.h"

#define PANEL_ROWS (2 * WIDTH)
#define PANEL_VECTORS 6
#define DEEP 768 /* columns at once: what they take of a panel's vectors stays in the nearest cache */
#define NEAR_FLOATS 131072 /* of vectors that pass all panels and stay in a core's own cache */

static size_t steps_of(int columns)
{
    return ((size_t)columns + WIDTH - 1) / WIDTH;
}

static size_t panel_floats(int columns)
{
    return steps_of(columns) * WIDTH * PANEL_ROWS;
}

/* Rows from `row` on, widened: [column % WIDTH][column / WIDTH][PANEL_ROWS], zeros for what is not there.
 * Of INT8 without their scale. */
static inline __attribute__((always_inline)) void pack_format(
    const Matrix *matrix, int format, int row, int rows, float *panel)
{
    int columns = matrix->columns;
    size_t phase = steps_of(columns) * PANEL_ROWS;
    int bits = bits_of(format);
    size_t step = PANEL_ROWS * WIDTH * bits / 8;
    const char *ahead =
        (const char *)matrix->weights + (size_t)(row + PANEL_ROWS) * columns * bits / 8;
    for (int column = 0; column < columns; column += WIDTH, panel += PANEL_ROWS, ahead += step) {
        for (size_t at = 0; at < step; at += 64) /* of the next panel */
            __builtin_prefetch(ahead + at);
        for (int first = 0; first < PANEL_ROWS; first += WIDTH) {
            Floats square[WIDTH], kept[WIDTH];
            if (first + WIDTH <= rows && column + WIDTH <= columns) {
                for (int r = 0; r < WIDTH; r++)
                    square[r] = widened(matrix, format, row + first + r, column);
                transpose(square);
                for (int i = 0; i < WIDTH; i++)
                    memcpy(panel + i * phase + first, &square[i], sizeof *square);
                continue;
            }
            for (int r = 0; r < WIDTH; r++)
                if (first + r >= rows)
                    kept[r] = (Floats){0};
                else if (column + WIDTH <= columns)
                    kept[r] = widened(matrix, format, row + first + r, column);
                else
                    kept[r] =
                        rest_of_row(matrix, format, row + first + r, column, columns - column);
            transpose(kept);
            for (int i = 0; i < WIDTH; i++)
                memcpy(panel + i * phase + first, &kept[i], sizeof *kept);
        }
    }
}

static void pack_rows(const Matrix *matrix, int row, int rows, float *panel)
{
    switch (matrix->format) {
    case FLOAT32:
        pack_format(matrix, FLOAT32, row, rows, panel);
        break;
    case BFLOAT16:
        pack_format(matrix, BFLOAT16, row, rows, panel);
        break;
    case INT8:
        pack_format(matrix, INT8, row, rows, panel);
        break;
    case INT8_GROUPS:
        pack_format(matrix, INT8_GROUPS, row, rows, panel);
        break;
    case INT4:
        pack_format(matrix, INT4, row, rows, panel);
        break;
    case INT4_HALVES:
        pack_format(matrix, INT4_HALVES, row, rows, panel);
        break;
    default:
        pack_format(matrix, INT4_BYTES, row, rows, panel);
    }
}

typedef struct {
    Floats half[2]; /* of a panel's rows */
} PanelSums;

/* One sum in WIDTH of N vectors, from a column on; N is known where it is inlined. */
static inline __attribute__((always_inline)) void add_steps(
    const float *panel, int steps, const float *const *x, int N, int column, int begins,
    PanelSums *sums)
{
    Floats low[PANEL_VECTORS], high[PANEL_VECTORS];
    for (int n = 0; n < N; n++) {
        low[n] = begins ? (Floats){0} : sums[n].half[0];
        high[n] = begins ? (Floats){0} : sums[n].half[1];
    }
    for (int step = 0; step < steps; step++, panel += PANEL_ROWS) {
        Floats a, b;
        memcpy(&a, panel, sizeof a);
        memcpy(&b, panel + WIDTH, sizeof b);
        for (int n = 0; n < N; n++) {
            float value = x[n][(size_t)column + (size_t)step * WIDTH];
            low[n] += a * value;
            high[n] += b * value;
        }
    }
    for (int n = 0; n < N; n++)
        sums[n] = (PanelSums){{low[n], high[n]}};
}

/* The WIDTH sums in one, as totals_of adds them. */
static inline Floats in_one(PanelSums (*sums)[PANEL_VECTORS], int n, int half)
{
    Floats four[4];
    for (int j = 0; j < 4; j++) {
        four[j] = sums[j][n].half[half];
        for (int i = 4; i < WIDTH; i += 4) {
            four[j] += sums[i + j][n].half[half];
            AS_IT_IS(four[j]);
        }
    }
    four[0] += four[2];
    four[1] += four[3];
    AS_IT_IS(four[0]);
    AS_IT_IS(four[1]);
    return four[0] + four[1];
}

/* A panel's rows, from `row` on, times N vectors. */
static inline __attribute__((always_inline)) void panel_times(
    const Matrix *matrix, const float *panel, int row, int rows, const Vector *x, int N,
    float *const *y)
{
    PanelSums sums[WIDTH][PANEL_VECTORS];
    const float *wide[PANEL_VECTORS];
    int columns = matrix->columns;
    for (int n = 0; n < N; n++)
        wide[n] = x[n].wide;
    for (int begin = 0; begin < columns; begin += DEEP) {
        int end = columns - begin < DEEP ? columns : begin + DEEP;
        for (int i = 0; i < WIDTH; i++)
            add_steps(panel + (i * steps_of(columns) + begin / WIDTH) * PANEL_ROWS,
                      (end - begin - i + WIDTH - 1) / WIDTH, wide, N, begin + i, begin == 0, sums[i]);
    }
    for (int n = 0; n < N; n++) {
        PanelSums total = {{in_one(sums, n, 0), in_one(sums, n, 1)}};
        float out[PANEL_ROWS];
        memcpy(out, &total, sizeof out);
        for (int r = 0; matrix->format == INT8 && r < rows; r++)
            out[r] *= matrix->scales[row + r];
        memcpy(y[n] + row, out, rows * sizeof *out);
    }
}

/* y[n][row] = matrix[row] . x[n] for rows from begin to end; `panel` is of panel_floats. */
static __attribute__((noinline)) void multiply_panels(
    const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
    float *panel)
{
    int most = NEAR_FLOATS / matrix->columns, least = 8 * PANEL_VECTORS;
    int blocks = (count - 1) / (most < least ? least : most) + 1, each = (count - 1) / blocks + 1;
    each = (each + PANEL_VECTORS - 1) / PANEL_VECTORS * PANEL_VECTORS;
    for (int done = 0, stop; done < count; done = stop) {
        stop = count - done < each ? count : done + each;
        for (int row = begin; row < end; row += PANEL_ROWS) {
            int rows = end - row < PANEL_ROWS ? end - row : PANEL_ROWS, n = done;
            pack_rows(matrix, row, rows, panel);
            for (; n + PANEL_VECTORS <= stop; n += PANEL_VECTORS)
                panel_times(matrix, panel, row, rows, x + n, PANEL_VECTORS, y + n);
            for (; n + 2 <= stop; n += 2)
                panel_times(matrix, panel, row, rows, x + n, 2, y + n);
            if (n < stop)
                panel_times(matrix, panel, row, rows, x + n, 1, y + n);
        }
    }
}

#endif
