"""Gradient importance: Taylor, Fisher and gradient norm, from backward passes of the loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.importance.forward import Windows


class _BlockGradients(ABC):
    """Shared by all: gradients of the mean loss of each window, by parameter of a block.

    Embeddings and head are left out. Sums are kept in float32 and in the host's memory, whatever
    the model's dtype and device, and a gradient is freed as soon as it is added: a card holds the
    model, the activations of one window, and the gradient of one parameter.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._named = [
            {f"{block}.{name}": p for name, p in layer.named_parameters()}
            for block, layer in enumerate(backbone.blocks)
        ]
        self._sums = {
            name: torch.zeros(p.shape, dtype=torch.float32)
            for block in self._named
            for name, p in block.items()
        }

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in one batch of windows; a sample is a window."""
        for window in ids.split(1):  # type: ignore[no-untyped-call]  # torch's own
            self._add(window)

    def _add(self, ids: Int[Tensor, "batch tokens"]) -> None:
        parameters = {name: p for block in self._named for name, p in block.items()}
        with self._gradients_added(parameters), torch.enable_grad():
            windows = Windows.of(self._backbone, ids)
            blocks = range(self._backbone.num_blocks)
            hidden = windows.through(blocks, windows.embedded.detach())
            loss = windows.nll(hidden) / windows.num_targets
            torch.autograd.backward(loss, inputs=list(parameters.values()))

    @contextmanager
    def _gradients_added(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Add the gradients of each backward pass within to the sums, and leave none."""
        before = {name: (p.requires_grad, p.grad) for name, p in parameters.items()}
        hooks = []
        for name, parameter in parameters.items():
            parameter.requires_grad_(True).grad = None
            take = partial(self._take, name)
            hook = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            hooks.append(hook)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, parameter in parameters.items():
                wanted, parameter.grad = before[name]
                parameter.requires_grad_(wanted)

    def _take(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sums[name] += self._part(parameter.grad.to("cpu", torch.float32))
        parameter.grad = None

    def _part(self, gradient: Tensor) -> Tensor:
        return gradient

    def state(self) -> dict[str, Tensor]:
        """The sums, as large as the blocks' weights in float32."""
        return self._sums

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self._sums = state

    def scores(self) -> Float[Tensor, " blocks"]:
        """Summed over a block's matrices and norms."""
        per_block = [
            sum(
                float(self._score(p.detach().to("cpu", torch.float32), self._sums[name]))
                for name, p in block.items()
            )
            for block in self._named
        ]
        return self._finish(torch.tensor(per_block, dtype=torch.float64))

    @abstractmethod
    def _score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """What one parameter adds to its block's score."""

    def _finish(self, scores: Float[Tensor, " blocks"]) -> Float[Tensor, " blocks"]:
        return scores


class Taylor(_BlockGradients):
    """Sum over a block's weights of `|w * dL/dw|`, the gradient summed over samples first.

    Source: paper, section 4.2.2; Shortened LLaMA's Taylor criterion.
    """

    def _score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return (weight * gradient).abs().double().sum()


class Fisher(_BlockGradients):
    """Sum over a block's weights of the squared gradient, squared sample by sample.

    Source: paper, section 4.2.2 (named there as a variant of Taylor).
    """

    def _part(self, gradient: Tensor) -> Tensor:
        return gradient.square()

    def _score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return gradient.double().sum()


class GradientNorm(_BlockGradients):
    """L2 norm of a block's gradient, summed over samples first.

    Source: paper, section 4.2.2 (named there as a variant of Taylor).
    """

    def _score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return gradient.double().square().sum()

    def _finish(self, scores: Float[Tensor, " blocks"]) -> Float[Tensor, " blocks"]:
        return scores.sqrt()
