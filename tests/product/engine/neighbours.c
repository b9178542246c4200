/* Of each format of fewer bits: how many products of a vector among others differ from those of it alone. */
#include <stdio.h>
#include <stdlib.h>
#include "multiply.h"

#define ROWS 37
#define COLUMNS 768
#define COUNT 9

static double number(void)
{
    return rand() / (double)RAND_MAX - 0.5;
}

int main(void)
{
    static uint8_t weights[ROWS * COLUMNS];
    static float scales[ROWS * COLUMNS], minimums[ROWS * COLUMNS], units[ROWS * COLUMNS];
    static float x[COUNT * COLUMNS];
    static float together[COUNT][ROWS], alone[ROWS];
    for (int i = 0; i < ROWS * COLUMNS; i++)
        weights[i] = (uint8_t)rand();
    for (int i = 0; i < COUNT * COLUMNS; i++)
        x[i] = (float)number();
    for (int format = INT8; format <= INT4_BYTES; format++) {
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            scales[i] = minimums[i] = units[i] = (float)number();
            if (format == INT4_HALVES) { /* numbers of float16, which 15 random bits mostly are */
                ((uint16_t *)scales)[i] = (uint16_t)(rand() & 0x3bff);
                ((uint16_t *)minimums)[i] = (uint16_t)(rand() & 0xbbff);
            }
        }
        int columns = format == INT4_BYTES ? COLUMNS : 96; /* not all registers are full of either */
        Matrix matrix = {.weights = weights, .scales = scales, .minimums = minimums, .units = units,
                         .rows = ROWS, .columns = columns, .format = format, .by_dots = 1};
        float *scratch = malloc(sizeof(float) * scratch_floats(columns)), *to[COUNT], *one = alone;
        Vector vectors[COUNT];
        for (int n = 0; n < COUNT; n++) {
            vectors[n] = (Vector){x + n * COLUMNS, NULL};
            to[n] = together[n];
        }
        for (int count = 1; count <= COUNT; count++) {
            int differ = 0;
            multiply_rows(&matrix, vectors, count, 0, ROWS, to, scratch);
            for (int n = 0; n < count; n++) {
                multiply_rows(&matrix, vectors + n, 1, 0, ROWS, &one, scratch);
                for (int row = 0; row < ROWS; row++)
                    differ += memcmp(&together[n][row], &alone[row], sizeof(float)) != 0;
            }
            printf("%d\n", differ);
        }
        free(scratch);
    }
    return 0;
}
