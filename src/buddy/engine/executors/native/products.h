/* Products of normalised lanes with a block's matrices, shared among threads. */

#ifndef BUDDY_PRODUCTS_H
#define BUDDY_PRODUCTS_H

#include "adapters.h"

/* Normalised rows as vectors: of few, each thread makes its own; of more, all make them together. */
static void normalise(
    const Run *run, Team *team, int thread, Own *own, const float *const *rows, const float *norm,
    int count)
{
    int hidden = run->model->hidden, together = count > HOLES_AT_ONCE, begin = 0, end = count;
    float *wide = together ? run->normed : own->normed;
    bf16 *small = together ? run->normed_narrow : own->normed_narrow;
    if (together)
        share_of(count, 1, team, thread, &begin, &end);
    for (int n = 0; n < count; n++) {
        size_t at = (size_t)n * hidden;
        own->vectors[n] = (Vector){wide + at, small + at};
        if (n < begin || n >= end)
            continue;
        rms_norm(rows[n], norm, run->model->epsilon, hidden, wide + at);
        narrow_for_products(run->model, wide + at, small + at, hidden);
    }
    if (together)
        barrier(team);
}

#if HAS_TILES
#define PIECE 128 /* rows of weights that a thread takes at once for one panel of vectors */
#define BLOCK 256 /* vectors that pass the same rows: a multiple of 32 */

/* Columns of normalised rows as panels have them, in parts of DEPTH columns, panel by panel. */
static void normalise_parts(
    const Model *model, const float *const *rows, const float *norm, int count, int lanes,
    int begin, int end, bf16 *panels)
{
    int parts = model->hidden / DEPTH;
    float scales[TILE];
    for (int unit = begin; unit < end; unit++) {
        int first = unit / parts * TILE, column = unit % parts * DEPTH;
        int held = count - first < TILE ? count - first : TILE;
        if (unit == begin || column == 0)
            for (int n = 0; n < held; n++)
                scales[n] = rms_scale(rows[first + n], model->epsilon, model->hidden);
        __m512 low = _mm512_loadu_ps(norm + column), high = _mm512_loadu_ps(norm + column + 16);
        __m512 pairs[TILE];
        for (int n = 0; n < TILE; n++) {
            pairs[n] = _mm512_setzero_ps();
            if (n >= held)
                continue;
            const float *x = rows[first + n] + column;
            __m512 scale = _mm512_set1_ps(scales[n]);
            __m512 a = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), scale), low);
            __m512 b = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16), scale), high);
            pairs[n] = (__m512)_mm512_cvtne2ps_pbh(b, a);
        }
        bf16 *to = panels + (size_t)first * model->hidden + (size_t)column * lanes;
        if (lanes > 1)
            transpose(pairs);
        for (int i = 0; i < lanes; i++)
            _mm512_storeu_ps(to + i * DEPTH, pairs[i]);
    }
    WRITTEN();
}

/* Normalised rows as panels: of few, each thread makes its own; of more, all make them together. */
static Panels normed_panels(
    const Run *run, Team *team, int thread, const Own *own, const float *const *rows,
    const float *norm, const Matrix *matrix, int count, int together)
{
    const Model *model = run->model;
    Panels made = {own->normed_narrow, NULL, count, panel_lanes(matrix, count)};
    int units = (count + TILE - 1) / TILE * (model->hidden / DEPTH), begin = 0, end = units;
    if (together && made.lanes > 1) {
        made.panels = run->normed_panels;
        share_of(units, 1, team, thread, &begin, &end);
    }
    normalise_parts(model, rows, norm, count, made.lanes, begin, end, (bf16 *)made.panels);
    if (together && made.lanes > 1)
        barrier(team);
    return made;
}

static Panels attended_panels(
    const Run *run, Team *team, int thread, const Own *own, const Matrix *matrix, int count)
{
    int width = run->model->heads * run->model->head_size, parts = width / DEPTH, begin, end;
    if (panel_lanes(matrix, count) == 1)
        return (Panels){run->attended_narrow + (size_t)own->active[0] * width, NULL, 1, 1};
    share_of((count + TILE - 1) / TILE * parts, 1, team, thread, &begin, &end);
    for (int unit = begin; unit < end; unit++) {
        int first = unit / parts * TILE, column = unit % parts * DEPTH;
        const bf16 *rows[TILE] = {NULL};
        for (int n = 0; n < TILE && first + n < count; n++)
            rows[n] = run->attended_narrow + (size_t)own->active[first + n] * width;
        pack_panel(rows, count - first, column, column + DEPTH,
                   run->attended_panels + (size_t)first * width);
    }
    WRITTEN();
    barrier(team);
    return (Panels){run->attended_panels, NULL, count, TILE};
}

/* Panels as a matrix is multiplied with: in bytes, if it is INT8. Each thread makes its own, or all make
 * them together. */
static Panels panels_for(
    const Matrix *matrix, Panels x, const Run *run, Team *team, int thread, const Own *own,
    int together)
{
    if (matrix->format != INT8)
        return x;
    int parts = matrix->columns / 64, panels = (x.count + TILE - 1) / TILE;
    int begin = 0, end = panels * parts;
    int8_t *bytes = (int8_t *)(together ? run->byte_panels : own->byte_panels);
    if (together)
        share_of(end, 1, team, thread, &begin, &end);
    for (int panel = 0; panel < panels; panel++) {
        const bf16 *from = x.panels + (size_t)panel * TILE * matrix->columns;
        __m512 unit = unit_of(from, matrix->columns);
        _mm512_storeu_ps(own->units + panel * TILE, unit);
        int first = begin - panel * parts, last = end - panel * parts;
        split_panel(from, first < 0 ? 0 : first, last > parts ? parts : last, unit,
                    bytes + (size_t)panel * TILE * matrix->columns * 2);
    }
    WRITTEN();
    if (together)
        barrier(team);
    return (Panels){(const bf16 *)bytes, own->units, x.count, TILE};
}

/* What threads do of a product with a matrix, or with two that are gated. Vectors are taken in blocks
 * that stay in a core's own cache while rows pass. */
static void multiply_pieces(
    Team *team, Own *own, const Matrix *matrix, const Matrix *up, const Panels *x, const Sink *sink)
{
    /* Few vectors are soon multiplied: larger pieces then, which memory serves better. */
    int most = matrix->rows / (4 * size_of(team)), rows = PIECE * TILE / x->count, begin, end;
    rows = ((rows > most ? most : rows) / (2 * TILE) + 1) * 2 * TILE;
    int pieces = (matrix->rows + rows - 1) / rows, blocks = (x->count + BLOCK - 1) / BLOCK;
    Queue queue = open_queue(team, &own->opened, pieces * blocks, 1);
    while (take_piece(&queue, &begin, &end)) {
        int first = begin / pieces * BLOCK, row = begin % pieces * rows, left = x->count - first;
        Panels here = {x->panels + (size_t)first * matrix->columns,
                       x->units == NULL ? NULL : x->units + first, left < BLOCK ? left : BLOCK,
                       x->lanes};
        Sink there = *sink;
        if (there.inner != NULL)
            there.inner += (size_t)first * matrix->rows;
        else
            there.active += first;
        multiply_by_tiles(matrix, up, &here, row,
                          row + rows < matrix->rows ? row + rows : matrix->rows, &there,
                          own->scratch);
    }
}

static void place_product(
    Team *team, Own *own, const Matrix *matrix, const Panels *x, float *base, size_t stride,
    int adds)
{
    Sink sink = {.base = base, .stride = stride, .active = own->active, .adds = adds};
    multiply_pieces(team, own, matrix, NULL, x, &sink);
}
#endif

/* How many lanes come next. What those before them have left is overwritten. */
static int lanes_from(Team *team, int from, int count)
{
    if (from > 0)
        barrier(team);
    return count - from < LANES_AT_ONCE ? count - from : LANES_AT_ONCE;
}

static void multiply_share(
    Team *team, int thread, const Own *own, const Matrix *matrix, int count)
{
    int begin, end;
    share_of(matrix->rows, TILE, team, thread, &begin, &end);
    multiply_rows(matrix, own->vectors, count, begin, end, own->outputs, own->scratch);
}

/* Normalise rows and multiply them with some matrices; the sums of active lane n go to
 * outputs[i] + active[n] * (rows of matrix i). A barrier must follow. */
static void project(
    const Run *run, Team *team, int thread, Own *own, const float *const *rows, const float *norm,
    int count, int together, const Matrix *const *matrices, float *const *outputs, int number)
{
#if HAS_TILES
    if (is_by_tiles(run, matrices[0])) {
        Panels x = normed_panels(run, team, thread, own, rows, norm, matrices[0], count, together);
        x = panels_for(matrices[0], x, run, team, thread, own, together);
        for (int i = 0; i < number; i++)
            place_product(team, own, matrices[i], &x, outputs[i], (size_t)matrices[i]->rows, 0);
        return;
    }
#endif
    (void)together;
    for (int from = 0, now; from < count; from += now) {
        now = lanes_from(team, from, count);
        normalise(run, team, thread, own, rows + from, norm, now);
        /* Of matrices that read the same, the first alone may have an adapter that knows the depth. */
        lower(run, team, thread, own, own->active + from, now, matrices, 1);
        for (int i = 0; i < number; i++) {
            for (int n = 0; n < now; n++)
                own->outputs[n] = outputs[i] + (size_t)own->active[from + n] * matrices[i]->rows;
            multiply_share(team, thread, own, matrices[i], now);
            if (i == 0)
                raise_share(run, team, thread, matrices[0], run->low, now, own->outputs);
        }
    }
}

/* Add a product to the residual of some lanes. */
static void add_share(
    Team *team, int thread, const Run *run, const Own *own, const Matrix *matrix,
    const int32_t *lanes, int count)
{
    int begin, end, hidden = run->model->hidden;
    share_of(matrix->rows, TILE, team, thread, &begin, &end);
    float *products[count];
    for (int n = 0; n < count; n++) /* the query's space is free by now */
        products[n] = run->query + (size_t)lanes[n] * hidden;
    multiply_rows(matrix, own->vectors, count, begin, end, products, own->scratch);
    raise_rows(run, matrix, run->low, count, begin, end, products);
    for (int n = 0; n < count; n++) {
        float *residual = run->step->residual + (size_t)lanes[n] * hidden;
        for (int i = begin; i < end; i++)
            residual[i] += products[n][i];
    }
}

/* Attention's output, added to the residual. */
static void add_attended(Run *run, Team *team, int thread, Own *own, const Matrix *output, int count)
{
    size_t width = (size_t)run->model->heads * run->model->head_size;
#if HAS_TILES
    if (is_by_tiles(run, output)) {
        Panels x = attended_panels(run, team, thread, own, output, count);
        x = panels_for(output, x, run, team, thread, own, 1);
        place_product(team, own, output, &x, run->step->residual, run->model->hidden, 1);
        return;
    }
#endif
    for (int n = 0; n < count; n++) {
        size_t at = (size_t)own->active[n] * width;
        own->vectors[n] = (Vector){run->attended + at, run->attended_narrow + at};
    }
    lower(run, team, thread, own, own->active, count, &output, 1);
    add_share(team, thread, run, own, output, own->active, count);
}

/* A thread's rows of the MLP's inner values: SiLU of the gate's times those of up. */
static void gate_share(
    const Run *run, Team *team, int thread, Own *own, const Block *weights, int count)
{
    int inner = run->model->inner, begin, end;
    share_of(inner, TILE, team, thread, &begin, &end);
    for (int done = 0; done < count; done += GATED_VECTORS) {
        int held = count - done < GATED_VECTORS ? count - done : GATED_VECTORS;
        float *gates[GATED_VECTORS], *ups[GATED_VECTORS];
        for (int n = 0; n < held; n++) {
            gates[n] = run->inner + (size_t)(done + n) * inner;
            ups[n] = own->ups + (size_t)n * inner;
        }
        const Vector *x = own->vectors + done;
        multiply_rows(&weights->gate, x, held, begin, end, gates, own->scratch);
        multiply_rows(&weights->up, x, held, begin, end, ups, own->scratch);
        const float *low = run->low + (size_t)done * run->model->rank;
        raise_rows(run, &weights->gate, low, held, begin, end, gates);
        raise_rows(run, &weights->up, low + (size_t)count * run->model->rank, held, begin, end, ups);
        for (int n = 0; n < held; n++) {
            for (int i = begin; i < end; i++)
                gates[n][i] = silu(gates[n][i]) * ups[n][i];
            narrow_for_products(run->model, gates[n] + begin,
                                run->inner_narrow + (size_t)(done + n) * inner + begin, end - begin);
        }
    }
}

/* The MLP, added to the residual. */
static void add_mlp(
    Run *run, Team *team, int thread, Own *own, const Block *weights, const float *const *rows,
    int count)
{
    const Model *model = run->model;
#if HAS_TILES
    if (is_by_tiles(run, &weights->gate)) {
        Panels inner = {run->inner_panels, NULL, count, panel_lanes(&weights->down, count)};
        Panels x = normed_panels(run, team, thread, own, rows, weights->mlp_norm, &weights->gate,
                                 count, 1);
        x = panels_for(&weights->gate, x, run, team, thread, own, 1);
        Sink sink = {.inner = run->inner_panels};
        multiply_pieces(team, own, &weights->gate, &weights->up, &x, &sink);
        barrier(team);
        x = panels_for(&weights->down, inner, run, team, thread, own, 1);
        place_product(team, own, &weights->down, &x, run->step->residual, model->hidden, 1);
        return;
    }
#endif
    for (int from = 0, now; from < count; from += now) {
        now = lanes_from(team, from, count);
        normalise(run, team, thread, own, rows + from, weights->mlp_norm, now);
        lower(run, team, thread, own, own->active + from, now,
              (const Matrix *[]){&weights->gate, &weights->up}, 2);
        gate_share(run, team, thread, own, weights, now);
        barrier(team);
        for (int n = 0; n < now; n++) {
            size_t at = (size_t)n * model->inner;
            own->vectors[n] = (Vector){run->inner + at, run->inner_narrow + at};
        }
        lower(run, team, thread, own, own->active + from, now, (const Matrix *[]){&weights->down}, 1);
        add_share(team, thread, run, own, &weights->down, own->active + from, now);
    }
}

#endif
