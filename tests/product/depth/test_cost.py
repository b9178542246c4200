import pytest

from buddy.depth.cost import (
    ModelShape,
    block_flops,
    decision_flops,
    decision_share,
    kv_bytes_per_token,
    plan_flops,
    weight_bytes,
)

# The paper's worked example: L=32, d=4096, d_c=11008, T=1024, r=32, two pinned blocks, batch 1.
D, D_C, T = 4096, 11008, 1024


def shape(mlp_matrices):
    return ModelShape(
        num_blocks=32,
        block_params=4 * D * D + mlp_matrices * D * D_C,
        outside_params=0,
        head_params=32000 * D,
        query_width=D,
        kv_width=D,
        bytes_per_param=2.0,
        bytes_per_kv=2.0,
    )


def test_decision_module_as_in_the_paper():
    # 2 * 1024 * 32 * (4096 + 30) = 270 401 536, printed as 2.70e8
    flops = decision_flops(batch=1, tokens=T, width=D, rank=32, num_blocks=32)
    assert flops == 270_401_536


@pytest.mark.parametrize(("blocks", "percent"), [(28, "0.00285"), (16, "0.00498")])
def test_the_share_of_the_decision_module_as_in_the_paper(blocks, percent):
    share = decision_share(shape(2), blocks, rank=32, tokens=T, context=T)
    assert f"{100 * share:.5f}" == percent


def test_one_block_as_in_the_paper():
    # 8Td^2 + 4T^2d + 4Tdd_c = 3.393e11: the paper counts two MLP matrices, printed as 3.39e11.
    assert block_flops(shape(2), T, T) == pytest.approx(3.39e11, rel=1e-3)
    # A gated MLP has three: 8Td^2 + 4T^2d + 6Tdd_c = 4.317e11.
    assert block_flops(shape(3), T, T) == pytest.approx(4.317e11, rel=1e-3)


def test_a_plan_adds_its_blocks_and_the_head():
    s = shape(3)
    half, full = plan_flops(s, 16, context=T), plan_flops(s, 32, context=T)
    assert full - half == 16 * block_flops(s, 1, T)
    assert half - 16 * block_flops(s, 1, T) == 2 * 32000 * D
    assert weight_bytes(s, 16) == 2 * (16 * s.block_params + 32000 * D)


def test_kv_bytes():
    # Llama-2-7B: 2 * 4096 * 2 bytes * 32 blocks = 524 288 bytes a token
    assert kv_bytes_per_token(shape(3)) == 524_288
    assert kv_bytes_per_token(shape(3), 16) == 262_144
