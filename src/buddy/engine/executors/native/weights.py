"""Which models the native decoder can run, and where their weights lie."""

import ctypes
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import DepthLinear
from buddy.backbone.families import PLAIN, rope_of_length
from buddy.backbone.quantised import QuantisedEmbedding, QuantisedLinear
from buddy.engine.executors.native import layout
from buddy.errors import ModelError

_ATTENTION: Final = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_MLP: Final = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def why_not(backbone: Backbone) -> str | None:
    """Why the kernel cannot run a model; None where it can."""
    config = backbone.config
    if backbone.device.type != "cpu":
        return f"the model is on {backbone.device}, and the native kernel runs on a CPU"
    if backbone.dtype not in layout.FORMATS:
        return f"its weights are {backbone.dtype}, and the native kernel reads bfloat16 and float32"
    if config.model_type not in PLAIN:
        return (
            f"the native kernel does not know model type {config.model_type!r}, which is none of "
            f"{', '.join(PLAIN)}"
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act!r}, expected silu"
    rope = rope_of_length(config)
    if rope is not None:
        return f"its rotary embedding is {rope!r}, which changes with the length"
    for linear in map(_base, _linears(backbone)):
        if type(linear) not in (nn.Linear, QuantisedLinear):
            return f"a linear layer is a {type(linear).__name__}: merge the adapter first"
        if not cast(Any, linear).weight.is_contiguous():
            return "a weight is not contiguous"
    return None


def _linears(backbone: Backbone) -> list[nn.Module]:
    blocks = [
        getattr(part, name)
        for block in cast(Any, backbone.blocks)
        for part, names in ((block.self_attn, _ATTENTION), (block.mlp, _MLP))
        for name in names.values()
    ]
    return [*blocks, backbone.head]


def _base(linear: nn.Module) -> nn.Module:
    """The layer that holds the weights: of one whose adapter knows the depth, that inside."""
    return linear.base if isinstance(linear, DepthLinear) else linear


def _table(backbone: Backbone) -> Tensor:
    """The weights that token ids are embedded by."""
    embedding = backbone.embedding
    return embedding.head.weight if isinstance(embedding, QuantisedEmbedding) else embedding.weight


def _fits_tiles(matrix: layout.Matrix) -> bool:
    """Whether tiles, which are 64 bytes deep, can read these weights; int4 is widened for them."""
    if matrix.format in (layout.FLOAT32, layout.INT8_GROUPS):
        return False
    return bool(matrix.columns % (64 if matrix.format == layout.INT8 else 32) == 0)


def _is_of_one_format(block: layout.Block) -> bool:
    """Whether matrices that are multiplied with the same vectors read them in the same format."""
    return len({getattr(block, name).format for name in (*_ATTENTION, *_MLP)}) == 1


class BoundWeights:
    """A model's weights as the kernel is told of them; norms and biases widened to float32.

    The memory behind every address is held here, not the parameter: `parameter.data = other` frees
    what a parameter alone kept alive. So a weight that moves is read where it was, and no other
    takes its address, by which a move could go unseen. To ask every weight before every step would
    cost a hundredth of the step; so between two steps a model that moves as a whole is followed,
    and whatever else changes is for `ExecutorChoice.refresh` to see, when a session begins.

    Args:
        backbone: The model.
        has_tiles: Whether the processor can multiply by tiles.

    Attributes:
        model: The structure.
        is_steady: Whether a lane's numbers are the same however many there are; by tiles those of
            4 bits are others than row by row.
    """

    def __init__(self, backbone: Backbone, has_tiles: bool) -> None:
        self._backbone, self._has_tiles = backbone, has_tiles
        self._dtype = backbone.dtype
        self._held: list[Any] = []
        self._positions = 0
        self.model = layout.Model()
        self.is_steady = True
        self._bind()

    def refresh(self, positions: int) -> None:
        """Follow a model that was moved, and cover as many positions; asked before every step.

        Raises:
            ModelError: The kernel cannot run the weights as they are now, or they have another
                number format than the keys and values that sessions already hold.
        """
        positions = max(positions, self._positions)  # of sessions that other threads are stepping
        if _table(self._backbone).data_ptr() != self.model.embedding.weights:
            self._follow()
        if positions > self._positions:
            # Of the angles' dtype, nothing else.
            hidden = torch.empty(1, 1, dtype=torch.float32, device="cpu")
            every = torch.arange(positions, device="cpu")[None]
            cos, sin = (t[0].contiguous() for t in self._backbone.rotary(hidden, every))
            self.model.cosines, self.model.sines = cos.data_ptr(), sin.data_ptr()
            self._angles, self._positions = (cos, sin), positions

    def _follow(self) -> None:
        reason, dtype = why_not(self._backbone), self._backbone.dtype
        if reason is None and dtype != self._dtype:
            reason = f"the session's cache is {self._dtype} and the weights are {dtype}"
        if reason is not None:
            raise ModelError(
                "the model's weights were changed while a session was under way, and the native "
                f"engine cannot go on: {reason}; begin a new session"
            )
        self._bind()

    def _hold(self, tensor: Tensor) -> Tensor:
        """The memory that a weight is in now, for as long as the kernel may read it."""
        memory = tensor.detach()
        self._held.append(memory)
        return memory

    def _widen(self, tensor: Tensor) -> Tensor:
        """A copy in float32, for as long as the kernel may read it."""
        wide = self._hold(tensor).float().contiguous()
        self._held.append(wide)
        return wide

    def _norm(self, module: Any) -> int | None:
        return None if module is None else self._widen(module.weight).data_ptr()

    def _matrix(self, layer: nn.Linear | QuantisedLinear | DepthLinear) -> layout.Matrix:
        linear = cast(nn.Linear | QuantisedLinear, _base(layer))
        quantised = linear if isinstance(linear, QuantisedLinear) else None
        minimums = None if quantised is None else quantised.minimums
        units = None if quantised is None else quantised.units
        numbers = (
            layout.FORMATS[linear.weight.dtype]
            if quantised is None
            else layout.QUANTISED[
                quantised.quantisation,
                quantised.scales.ndim,
                None if minimums is None else minimums.dtype,
            ]
        )
        return layout.Matrix(
            weights=self._hold(linear.weight).data_ptr(),
            scales=None if quantised is None else self._hold(quantised.scales).data_ptr(),
            minimums=None if minimums is None else self._hold(minimums).data_ptr(),
            units=None if units is None else self._hold(units).data_ptr(),
            bias=None if linear.bias is None else self._widen(linear.bias).data_ptr(),
            rows=linear.out_features,
            columns=linear.in_features,
            format=numbers,
            by_dots=numbers != layout.FLOAT32 and self._backbone.dtype == torch.bfloat16,
            **(self._adapter(layer) if isinstance(layer, DepthLinear) else {}),
        )

    def _adapter(self, layer: DepthLinear) -> dict[str, int]:
        """What an adapter adds that knows the depth; it holds all that the kernel reads of it."""
        down, up = (self._hold(part.detach().contiguous()) for part in (layer.down, layer.up.T))
        rank, columns = down.shape
        matrix = layout.Matrix(
            weights=down.data_ptr(),
            rows=rank,
            columns=columns,
            format=layout.FORMATS[down.dtype],
            by_dots=down.dtype == torch.bfloat16,
        )
        self._held.append(matrix)
        return {
            "down": ctypes.addressof(matrix),
            "up": up.data_ptr(),
            "deviations": self._widen(layer.table()).data_ptr(),
        }

    def _embedding(self, vocabulary: layout.Matrix) -> layout.Matrix:
        """The embedding as a matrix: the output projection where that is quantised and both."""
        embedding = self._backbone.embedding
        if isinstance(embedding, QuantisedEmbedding):
            return vocabulary
        rows, columns = embedding.weight.shape
        weights, numbers = self._hold(embedding.weight), layout.FORMATS[embedding.weight.dtype]
        return layout.Matrix(weights=weights.data_ptr(), rows=rows, columns=columns, format=numbers)

    def _bind(self) -> None:
        backbone, config = self._backbone, self._backbone.config
        self._held, self._positions = [], 0
        blocks = (layout.Block * backbone.num_blocks)()
        for index, (block, window) in enumerate(
            zip(backbone.blocks, backbone.windows, strict=True)
        ):
            layer = cast(Any, block)
            attention, mlp = layer.self_attn, layer.mlp
            blocks[index] = layout.Block(
                **{name: self._matrix(getattr(attention, at)) for name, at in _ATTENTION.items()},
                **{name: self._matrix(getattr(mlp, at)) for name, at in _MLP.items()},
                attention_norm=self._norm(layer.input_layernorm),
                mlp_norm=self._norm(layer.post_attention_layernorm),
                query_norm=self._norm(getattr(attention, "q_norm", None)),
                key_norm=self._norm(getattr(attention, "k_norm", None)),
                window=window or 0,
            )
        self._held.append(blocks)
        vocabulary = self._matrix(cast(Any, backbone.head))
        products = [vocabulary, *(getattr(b, n) for b in blocks for n in (*_ATTENTION, *_MLP))]
        is_bf16 = backbone.dtype == torch.bfloat16
        first = cast(Any, backbone.blocks[0])
        scales = backbone.depth_scales
        self.model = layout.Model(
            blocks=ctypes.cast(blocks, ctypes.POINTER(layout.Block)),
            embedding=self._embedding(vocabulary),
            final_norm=self._norm(backbone.final_norm),
            vocabulary=vocabulary,
            epsilon=config.rms_norm_eps,
            scaling=first.self_attn.scaling,
            num_blocks=backbone.num_blocks,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=backbone.head_dim,
            inner=config.intermediate_size,
            by_tiles=self._has_tiles
            and is_bf16
            and scales is None
            and all(map(_fits_tiles, products))
            and all(map(_is_of_one_format, blocks)),
            is_bf16=is_bf16,
            rank=0 if scales is None else scales.config.rank,
            depths=0 if scales is None else scales.config.depths[-1] + 1,
        )
        self.is_steady = not self.model.by_tiles or all(
            matrix.format in (layout.BFLOAT16, layout.INT8) for matrix in products
        )
