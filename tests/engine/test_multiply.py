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
from buddy.engine.executors.native.instructions import cpu_features, sets_of

SOURCE = """
#include "multiply.h"
int may_use(void)
{
#if HAS_TILES
    return may_use_tiles();
#else
    return 0;
#endif
}
int has_dots(void) { return HAS_BF16_DOT; }
size_t bytes(int columns, int count) { return multiply_bytes(columns, count); }
void products(const Matrix *matrix, const Vector *x, int count, int begin, int end, float *const *y,
              int has_tiles, void *memory)
{
    multiply_rows(matrix, x, count, begin, end, y, has_tiles, memory);
}
"""
SHAPES = [(64, 32), (48, 96), (70, 64), (33, 40), (16, 576), (5, 32)]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 40)


@pytest.fixture(scope="module", params=sets_of(platform.machine()), ids=lambda one: one.name)
def kernel(request, tmp_path_factory):
    """The products, compiled for an instruction set."""
    one = request.param
    if not one.needs <= cpu_features():
        pytest.skip(f"this processor lacks {one.name}")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "products.c").write_text(SOURCE)
    sources = Path(compiler.__file__).parent
    command = [*compiler.find_compiler(), *compiler.FLAGS, *one.flags, f"-I{sources}"]
    subprocess.run([*command, folder / "products.c", "-o", folder / "products.so"], check=True)
    library = ctypes.CDLL(str(folder / "products.so"))
    library.bytes.restype = ctypes.c_size_t
    return library


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*(one.data_ptr() for one in tensors))


def products(kernel, weights: Tensor, x: Tensor, *, bias=None, parts=1, tiles=True):
    """y[n][row] of all rows, computed in parts as threads do."""
    rows, columns = weights.shape
    count = len(x)
    narrow = x.to(torch.bfloat16)
    vectors = torch.stack(
        [
            torch.tensor([one.data_ptr() for one in x]),
            torch.tensor([one.data_ptr() for one in narrow]),
        ],
        1,
    )
    matrix = layout.Matrix(
        weights=weights.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        rows=rows,
        columns=columns,
        format=layout.FORMATS[weights.dtype],
    )
    memory = torch.empty(kernel.bytes(columns, count), dtype=torch.uint8)
    y = torch.full((count, rows), torch.nan)
    has_tiles = int(tiles and kernel.may_use())
    edges = [rows * part // parts // 16 * 16 for part in range(parts)] + [rows]
    for begin, end in itertools.pairwise(edges):
        kernel.products(
            ctypes.byref(matrix),
            ctypes.c_void_p(vectors.data_ptr()),
            count,
            begin,
            end,
            pointers(list(y)),
            has_tiles,
            ctypes.c_void_p(memory.data_ptr()),
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


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_vectors_product_does_not_depend_on_those_beside_it(kernel, rows, columns):
    torch.manual_seed(0)
    weights = torch.randn(rows, columns).to(torch.bfloat16)
    x = torch.randn(max(COUNTS), columns)
    if not kernel.has_dots():
        pytest.skip("a single vector is multiplied without widening the row first")
    for tiles in (True, False):
        whole = products(kernel, weights, x, tiles=tiles)
        for count in COUNTS:
            assert torch.equal(products(kernel, weights, x[:count], tiles=tiles), whole[:count])
        assert torch.equal(products(kernel, weights, x, parts=2, tiles=tiles), whole)


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
