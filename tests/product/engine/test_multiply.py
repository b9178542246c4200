"""The kernel's products, by every instruction set that this machine has: equal to exact sums.

A product's bits may not depend on which vectors are multiplied beside it: a sequence would get
another text by who else is served.
"""

import ctypes
import itertools
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from buddy.engine.executors.native import compiler, layout
from buddy.engine.executors.native.instructions import sets_of
from tests.product.engine.twins import runnable

SOURCE = """
#include <stdlib.h>
#include "multiply.h"
#include "tiles.h"
int may_use(void)
{
#if HAS_TILES
    return may_use_tiles();
#else
    return 0;
#endif
}
int has_dots(void) { return HAS_BF16_DOT; }
int largest(void) { return LARGEST; }
int has_nibbles(void) { return !HAS_BYTE_DOT; }
static void by_rows(const Matrix *matrix, const Vector *x, int count, int begin, int end, float *y)
{
    float *scratch = malloc(sizeof(float) * scratch_floats(matrix->columns)), *to[count];
    for (int n = 0; n < count; n++)
        to[n] = y + (size_t)n * matrix->rows;
    multiply_rows(matrix, x, count, begin, end, to, scratch);
    free(scratch);
}
#if HAS_TILES
static Panels panels_of(const Matrix *matrix, const Vector *x, int count, bf16 *panels)
{
    int columns = matrix->columns;
    if (panel_lanes(matrix, count) == 1)
        return (Panels){x[0].narrow, NULL, 1, 1};
    for (int n = 0; n < count; n += TILE) {
        const bf16 *rows[TILE];
        for (int i = 0; i < TILE && n + i < count; i++)
            rows[i] = x[n + i].narrow;
        pack_panel(rows, count - n, 0, columns, panels + (size_t)n * columns);
    }
    return (Panels){panels, NULL, count, TILE};
}
static Panels in_bytes(Panels x, int columns, int8_t *bytes, float *units)
{
    for (int n = 0; n < x.count; n += TILE) {
        const bf16 *panel = x.panels + (size_t)n * columns;
        __m512 unit = unit_of(panel, columns);
        _mm512_storeu_ps(units + n, unit);
        split_panel(panel, 0, columns / 64, unit, bytes + (size_t)n * columns * 2);
    }
    return (Panels){(bf16 *)bytes, units, x.count, TILE};
}
static void by_tiles(const Matrix *matrix, const Matrix *up, const Vector *x, int count, int begin,
                     int end, float *y, bf16 *inner)
{
    int32_t active[count];
    for (int n = 0; n < count; n++)
        active[n] = n;
    bf16 *panels = malloc(sizeof(bf16) * (count + TILE) * matrix->columns);
    char *memory = malloc(tile_bytes(matrix->columns));
    int8_t *bytes = malloc(sizeof(bf16) * (count + TILE) * matrix->columns);
    float units[count + TILE];
    Panels packed = panels_of(matrix, x, count, panels);
    if (matrix->format == INT8)
        packed = in_bytes(packed, matrix->columns, bytes, units);
    Sink sink = {.base = y, .stride = matrix->rows, .active = active, .inner = inner};
    multiply_by_tiles(matrix, up, &packed, begin, end, &sink, memory);
    free(memory);
    free(panels);
    free(bytes);
}
#endif
void products(const Matrix *matrix, const Vector *x, int count, int begin, int end, float *y,
              int has_tiles)
{
#if HAS_TILES
    int deep = matrix->format == INT8 ? 64 : 32;
    if (has_tiles && matrix->format != FLOAT32 && matrix->columns % deep == 0) {
        by_tiles(matrix, NULL, x, count, begin, end, y, NULL);
        return;
    }
#endif
    by_rows(matrix, x, count, begin, end, y);
}
void gated(const Matrix *gate, const Matrix *up, const Vector *x, int count, uint16_t *inner)
{
#if HAS_TILES
    by_tiles(gate, up, x, count, 0, gate->rows, NULL, inner);
#endif
}
"""
SHAPES = [(64, 32), (48, 96), (70, 64), (33, 40), (16, 576), (5, 32)]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 40, 70)


@pytest.fixture(
    scope="module", params=sets_of(platform.machine()), ids=lambda known_set: known_set.name
)
def kernel(request, tmp_path_factory):
    """The products, compiled for an instruction set."""
    folder = tmp_path_factory.mktemp("kernel")
    flags = runnable(request.param, folder)
    if flags is None:
        pytest.skip(f"this processor lacks {request.param.name}")
    (folder / "products.c").write_text(SOURCE)
    sources = Path(compiler.__file__).parent
    command = [*compiler.find_compiler(), *compiler.FLAGS, *flags, f"-I{sources}"]
    subprocess.run([*command, folder / "products.c", "-o", folder / "products.so"], check=True)
    return ctypes.CDLL(str(folder / "products.so"))


def vectors_of(x):
    """What holds vectors in both number formats, and their addresses."""
    narrow = x.to(torch.bfloat16)
    addresses = [[tensor.data_ptr() for tensor in form] for form in (x, narrow)]
    return torch.tensor(addresses).T.contiguous(), narrow


def matrix_of(weights: Tensor, bias=None, scales=None, minimums=None, units=None, dots=True):
    rows, columns = weights.shape
    numbers = (
        layout.FORMATS[weights.dtype]
        if scales is None
        else layout.QUANTISED[
            "int8" if weights.dtype == torch.int8 else "int4",
            scales.ndim,
            None if minimums is None else minimums.dtype,
        ]
    )
    return layout.Matrix(
        weights=weights.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        minimums=None if minimums is None else minimums.data_ptr(),
        units=None if units is None else units.data_ptr(),
        rows=rows,
        columns=columns * (2 if weights.dtype == torch.uint8 else 1),
        format=numbers,
        by_dots=dots and weights.dtype != torch.float32,
    )


def products(kernel, weights: Tensor, x: Tensor, *, parts=1, tiles=True, **numbers):
    """y[n][row] of all rows, computed in parts as threads do."""
    rows = len(weights)
    vectors, _narrow = vectors_of(x)
    matrix = matrix_of(weights, **numbers)
    y = torch.full((len(x), rows), torch.nan)
    has_tiles = int(tiles and kernel.may_use())
    edges = [rows * part // parts // 16 * 16 for part in range(parts)] + [rows]
    for begin, end in itertools.pairwise(edges):
        kernel.products(
            ctypes.byref(matrix),
            ctypes.c_void_p(vectors.data_ptr()),
            len(x),
            begin,
            end,
            ctypes.c_void_p(y.data_ptr()),
            has_tiles,
        )
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_exact_but_for_the_order_of_sums(kernel, rows, columns, dtype):
    torch.manual_seed(rows)
    weights, bias = torch.randn(rows, columns).to(dtype), torch.randn(rows)
    for count in COUNTS:
        x = torch.randn(count, columns)
        # Rounded where the instruction reads bfloat16 on both sides.
        is_rounded = dtype == torch.bfloat16 and kernel.has_dots()
        read = x.to(torch.bfloat16) if is_rounded else x
        exact = (read.double() @ weights.double().T + bias).float()
        found = products(kernel, weights, x, bias=bias)
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-5)


OF_FEW_BITS = ["int8", "int4", "int4 of float16", "int4 of bytes"]
FEW_BITS = pytest.mark.parametrize("few_bits", OF_FEW_BITS)


def quantised(rows, columns, few_bits):
    """Random weights of few bits, what the kernel is told of them, and what they mean.

    Their columns are rounded up to what groups with units need.
    """
    if few_bits == "int4 of bytes":
        columns = -(-columns // 256) * 256
    bits = 8 if few_bits == "int8" else 4
    values = torch.randint(1 - 2 ** (bits - 1), 2 ** (bits - 1), (rows, columns))
    if bits == 8:
        scales = torch.rand(rows) / 50
        return values.to(torch.int8), {"scales": scales}, values * scales[:, None]
    low, high = (values + 8).view(rows, -1, 2, 16).unbind(2)
    packed = (low | high << 4).to(torch.uint8).view(rows, -1)
    scales, minimums = torch.rand(rows, columns // 32) / 5, torch.randn(rows, columns // 32)
    if few_bits == "int4":
        return packed, {"scales": scales}, values * scales.repeat_interleave(32, 1)
    if few_bits == "int4 of float16":
        minimums[0, 0] = 3e-6  # a subnormal number of float16
        numbers = {"scales": scales.half(), "minimums": minimums.half()}
        scales, minimums = (part.float() for part in numbers.values())
    else:
        units = (torch.randn(rows, columns // 256, 2) / 100).half().float()
        scales, minimums = (torch.randint(256, scales.shape, dtype=torch.uint8) for _ in range(2))
        numbers = {"scales": scales, "minimums": minimums, "units": units}
        scales, minimums = (
            part * units[..., which].repeat_interleave(8, 1)
            for which, part in enumerate((scales, minimums))
        )
    scales, minimums = (part.repeat_interleave(32, 1) for part in (scales, minimums))
    return packed, numbers, (values + 8) * scales + minimums


@pytest.mark.parametrize("format_name", ["bfloat16", "float32", *OF_FEW_BITS])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (20, 5120)])
def test_a_vectors_product_does_not_depend_on_those_beside_it(kernel, rows, columns, format_name):
    torch.manual_seed(0)
    weights, numbers = torch.randn(rows, columns), {}
    if format_name.startswith("int"):
        columns = -(-columns // 64) * 64
        weights, numbers, meant = quantised(rows, columns, format_name)
        columns = meant.shape[1]
    elif format_name == "bfloat16":
        weights = weights.bfloat16()
    x = torch.randn(max(COUNTS), columns)
    for tiles, dots in ((True, True), (False, True), (False, False)):
        how = {**numbers, "tiles": tiles, "dots": dots}
        whole = products(kernel, weights, x, **how)
        for count in COUNTS:
            assert torch.equal(products(kernel, weights, x[:count], **how), whole[:count])
        assert torch.equal(products(kernel, weights, x, parts=2, **how), whole)


@pytest.mark.parametrize("columns", [64, 576, 1536])
def test_int8_by_tiles_is_int8_by_rows_of_what_tiles_read(kernel, columns):
    """So the kernel may take the faster for as many lanes as there are."""
    if not kernel.may_use():
        pytest.skip("no tiles")
    torch.manual_seed(columns)
    weights, numbers, _ = quantised(70, columns, "int8")
    x = torch.randn(40, columns).bfloat16().float()
    x[3], x[5, 1] = 0, torch.inf
    x[7] *= 1e-38
    numbers["bias"] = torch.randn(70)
    by_rows = products(kernel, weights, x, tiles=False, **numbers)
    for count in (1, 7, 40):
        by_tiles = products(kernel, weights, x[:count], **numbers)
        assert torch.equal(by_tiles.view(torch.int32), by_rows[:count].view(torch.int32))


def in_whole_numbers(x, largest):
    """Vectors as the kernel rounds them, in float64; `largest` is what the largest becomes."""
    unit = x.abs().amax(1, keepdim=True) / largest
    return (x.double() * (1 / unit).double()).round() * unit.double()


@FEW_BITS
@pytest.mark.parametrize(
    ("rows", "columns"), [(70, 64), (48, 96), (5, 32), (33, 192), (21, 608), (6, 2_080)]
)
def test_quantised_products_are_those_of_the_weights_they_mean(kernel, rows, columns, few_bits):
    torch.manual_seed(rows)
    weights, numbers, meant = quantised(rows, columns, few_bits)
    columns = meant.shape[1]
    deep = 64 if few_bits == "int8" else 32
    ways = ((True, True), (False, True), (False, False))
    for count, (tiles, dots) in itertools.product(COUNTS, ways):
        x = torch.randn(count, columns)
        by_tiles = tiles and kernel.may_use() and columns % deep == 0
        # Tiles hold vectors in bfloat16, or in bytes made of it, and of 4 bits the scaled numbers.
        held = meant.bfloat16() if by_tiles and few_bits != "int8" else meant
        read = x.bfloat16().double() if by_tiles else x.double()
        if by_tiles and few_bits == "int8":
            read = in_whole_numbers(read.float(), 32639)
        elif dots and not by_tiles and few_bits != "int8" and kernel.has_nibbles():
            read = in_whole_numbers(x.view(-1, 32), 127).view_as(x)
        elif dots and not by_tiles:
            read = in_whole_numbers(x, kernel.largest())
        exact = read @ held.double().T
        found = products(kernel, weights, x, tiles=tiles, dots=dots, **numbers)
        # Sums in float32 are rounded: of 4 bits those of groups.
        sizes = read.abs() @ held.double().abs().T
        assert (found - exact).abs().le(1e-6 * sizes + 1e-5 * exact.abs()).all()


def vectors_with(largest):
    x = torch.randn(16, 1536)
    x[:, 7] = largest * (1 + torch.rand(16))  # as residuals of language models have one
    return x


LARGEST = pytest.mark.parametrize("largest", [1.0, 100.0, 10_000.0])


@LARGEST
def test_vectors_in_groups_of_bytes_lose_a_quarter_of_what_weights_of_4_bits_do(kernel, largest):
    if not kernel.has_nibbles():
        pytest.skip("vectors are in whole numbers of 16 bits, or in bfloat16")
    torch.manual_seed(0)
    weights, numbers, meant = quantised(64, 1536, "int4")
    x = vectors_with(largest)
    exact = x.double() @ meant.double().T
    scales = numbers["scales"].double().repeat_interleave(32, 1)
    moved = meant + (torch.rand(meant.shape) - 0.5) * scales  # as rounding has moved them
    found = products(kernel, weights, x, **numbers).double()
    assert (found - exact).norm() < (x.double() @ moved.double().T - exact).norm() / 4


@FEW_BITS
@LARGEST
def test_vectors_in_whole_numbers_lose_less_than_bfloat16_does(kernel, largest, few_bits):
    if few_bits != "int8" and (kernel.may_use() or kernel.has_nibbles()):
        pytest.skip("vectors are in bfloat16, or in groups of bytes")
    torch.manual_seed(0)
    weights, numbers, meant = quantised(64, 1536, few_bits)
    x = vectors_with(largest)
    exact = x.double() @ meant.double().T
    held = x.bfloat16().double() @ meant.double().T
    read = held if kernel.may_use() else exact  # bytes are made of bfloat16
    found = products(kernel, weights, x, **numbers).double()
    assert (found - read).norm() < (held - exact).norm() / 2


@pytest.mark.parametrize("count", [1, 2, 4, 9])
@pytest.mark.parametrize("columns", [20_000, 131_071, 131_072])
def test_the_largest_products_do_not_overflow(kernel, count, columns):
    weights = torch.full((5, columns), 127, dtype=torch.int8)
    weights[1::2] = -128
    scales, x = torch.full((5,), 0.01), torch.full((count, columns), 3.0)
    for tiles in (True, False):
        found = products(kernel, weights, x, scales=scales, tiles=tiles)
        exact = (x.double() @ (weights.double() * 0.01).T).float()
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)


@FEW_BITS
def test_vectors_in_whole_numbers_may_be_zero_and_keep_what_is_no_number(kernel, few_bits):
    weights, numbers, meant = quantised(64, 64, few_bits)
    x = torch.randn(20, meant.shape[1])
    x[2], x[7, 9], x[11, 3], x[13] = 0, torch.nan, torch.inf, 1e-38
    found = products(kernel, weights, x, **numbers)
    assert found[2].eq(0).all()
    assert not found[[7, 11]][:, meant[:, 3].ne(0) & meant[:, 9].ne(0)].isfinite().any()
    assert found[13].abs().le(1e-35).all()
    assert found[[n for n in range(20) if n not in (7, 11)]].isfinite().all()


def test_inner_values_come_as_the_panels_that_are_multiplied_next(kernel):
    if not kernel.may_use():
        pytest.skip("no tiles")
    torch.manual_seed(0)
    gate, up = (torch.randn(64, 32).bfloat16() for _ in range(2))
    for count in COUNTS:
        x = torch.randn(count, 32)
        vectors, narrow = vectors_of(x)
        lanes = 1 if count == 1 else 16
        inner = torch.full((-(-count // lanes), 32, lanes, 2), torch.nan).bfloat16()
        matrices = [ctypes.byref(matrix_of(matrix)) for matrix in (gate, up)]
        addresses = (ctypes.c_void_p(vectors.data_ptr()), ctypes.c_void_p(inner.data_ptr()))
        kernel.gated(*matrices, addresses[0], count, addresses[1])
        found = inner.transpose(1, 2).reshape(-1, 64)
        wide = narrow.float()
        exact = torch.nn.functional.silu(wide @ gate.float().T) * (wide @ up.float().T)
        torch.testing.assert_close(found[:count].float(), exact, atol=1e-2, rtol=1e-2)
        assert not found.isnan().any()


def test_what_is_no_number_stays_with_its_row_and_its_vector(kernel):
    weights = torch.randn(64, 64).to(torch.bfloat16)
    weights[33, 5] = torch.inf
    x = torch.randn(20, 64)
    x[7, 9] = torch.nan
    found = products(kernel, weights, x)
    assert found[7].isnan().all()
    rest = found[[n for n in range(20) if n != 7]]
    assert not rest[:, 33].isfinite().any()
    assert rest[:, [n for n in range(64) if n != 33]].isfinite().all()


def test_what_is_no_number_is_cast_to_no_whole_number(tmp_path):
    source, program = tmp_path / "nan.c", tmp_path / "nan"
    source.write_text(
        '#include "functions.h"\n'
        "int main(void) { volatile float x = NAN; return !isnan(exp_of(x)) || !isnan(silu(x)); }"
    )
    flags = ["-fsanitize=float-cast-overflow", "-fsanitize-undefined-trap-on-error"]
    folder = f"-I{Path(compiler.__file__).parent}"
    command = [*compiler.find_compiler(), "-O1", "-std=gnu11", *flags, folder]
    subprocess.run([*command, str(source), "-o", str(program), "-lm"], check=True)
    assert subprocess.run([program], check=False).returncode == 0
