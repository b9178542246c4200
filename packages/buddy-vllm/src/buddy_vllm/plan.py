"""A request's plan from its prompt's token ids: token table, head, top-k.

No weight of the model is read. The plan is fixed when the request is admitted, so a block that it
skips is never read by that request.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buddy_vllm.budget import AUTO, read_budget
from buddy_vllm.errors import BudgetError
from buddy_vllm.export import Export, read_export


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks that every token of a request runs, in order.

    Attributes:
        blocks: 0-based.
        num_blocks: Blocks of the model.
    """

    blocks: tuple[int, ...]
    num_blocks: int

    def salt(self, old: str | None, revision: str) -> str:
        """What keeps cached keys and values of one plan apart from those of another.

        Args:
            old: The salt that the request came with.
            revision: Of the export.
        """
        said = json.dumps([old, self.blocks, revision])
        return hashlib.sha256(said.encode()).hexdigest()


class Head:
    """A score for each middle block, from pooled table rows.

    Args:
        export: Has the tensors.
        part: `router` or `predictor`.
        decay: Weight that a token keeps with each newer one; 1 = a plain mean.
    """

    def __init__(self, export: Export, part: str, decay: float) -> None:
        found = export.tensors
        self.decay = decay
        self.table = found[f"{part}.table"]  # [vocab, width]
        self.last = found.get(f"{part}.last")  # [vocab, width]
        self.bias = found.get(f"{part}.bias")  # [width]
        self.up = found.get(f"{part}.up")  # [middle, width]
        self.offset = found[f"{part}.offset"]  # [middle]

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores [middle] of a prompt [tokens]; sums are float64, scores float32."""
        if self.decay == 1.0:
            total = self.table[ids].sum(0, dtype=np.float64)
            weight = float(len(ids))
        else:
            share = self.decay ** np.arange(len(ids) - 1, -1, -1, dtype=np.float64)
            total, weight = share @ self.table[ids].astype(np.float64), float(share.sum())
        x: NDArray[np.float32] = (total / max(weight, 1e-12)).astype(np.float32)
        if self.up is None or self.bias is None:
            pooled: NDArray[np.float32] = x + self.offset
            return pooled
        if self.last is not None:
            x = x + self.last[ids[-1]]
        x = x + self.bias
        e = np.exp(-np.abs(x))
        inner = x * np.where(x < 0, e, np.float32(1)) / (1 + e)  # SiLU
        scores: NDArray[np.float32] = self.up @ inner + self.offset
        return scores


class Planner:
    """Plans requests for one export.

    Args:
        export: As `read_export` gives it.
    """

    def __init__(self, export: Export) -> None:
        self.revision = export.revision
        self.num_blocks = export.num_blocks
        self._export = export
        self._full = Plan(tuple(range(export.num_blocks)), export.num_blocks)
        self._router = _head(export, "router", export.router)
        self._predictor = _head(export, "predictor", export.predictor)
        self._static: dict[int, Plan] = {}
        if export.order is not None:
            for gone in range(len(export.order) + 1):
                blocks = set(range(self.num_blocks)) - set(export.order[:gone])
                self._static[len(blocks)] = Plan(tuple(sorted(blocks)), self.num_blocks)

    @classmethod
    def of_folder(cls, folder: str | Path) -> "Planner":
        """A planner for the export in a folder.

        Raises:
            ExportError: There is none, or it is damaged.
        """
        return cls(read_export(Path(folder)))

    def plan(self, budget: object, token_ids: Sequence[int] | None) -> Plan:
        """The blocks that a request runs.

        Args:
            budget: As the request wrote it; None = full depth.
            token_ids: Of the prompt; None where it came as embeddings.

        Raises:
            BudgetError: It cannot be read or spent, or must be chosen from ids that are not there.
        """
        if budget is None:
            return self._full
        blocks = read_budget(budget, self.num_blocks, len(self._export.pinned))
        if blocks == AUTO:
            blocks = self._choose(token_ids)
        if blocks == self.num_blocks:
            return self._full
        if self._router is None:
            return self._static[blocks]
        scores = self._router(self._ids(token_ids, self._router))
        pinned = set(self._export.pinned)
        free = [block for block in range(1, self.num_blocks - 1) if block not in pinned]
        # A stable sort leaves ties in their order, the shallower block first.
        ranked = sorted(free, key=lambda block: -float(scores[block - 1]))
        chosen = {*pinned, *ranked[: blocks - len(pinned)]}
        return Plan(tuple(sorted(chosen)), self.num_blocks)

    def _choose(self, token_ids: Sequence[int] | None) -> int:
        """The likeliest number of blocks; of equals the fewer."""
        if self._predictor is None:
            raise BudgetError(
                "budget 'auto' needs a Budget Predictor and this model has none: name a budget "
                'such as 0.75 or "18 blocks"'
            )
        logits = self._predictor(self._ids(token_ids, self._predictor))
        settings: Any = self._export.predictor
        least = max(int(settings["least_blocks"]), len(self._export.pinned))
        return least + int(np.argmax(logits[least - 3 :]))

    def _ids(self, token_ids: Sequence[int] | None, head: Head) -> NDArray[np.int64]:
        if not token_ids:
            raise BudgetError(
                "this budget is spent by the prompt's token ids, and there are none: send text or "
                "token ids, or leave the budget out"
            )
        ids = np.asarray(token_ids, dtype=np.int64)
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(head.table):
            raise BudgetError(
                f"a token id of the prompt is outside of the vocabulary of {len(head.table)}"
            )
        return ids


def _head(export: Export, part: str, settings: Mapping[str, Any] | None) -> Head | None:
    return None if settings is None else Head(export, part, float(settings["decay"]))
