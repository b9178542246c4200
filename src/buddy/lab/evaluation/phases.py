"""What the tokens of answers ran, by phase: counted from a trace, each token in its own phase."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from buddy.budget.resolved import ResolvedBudget
from buddy.generation.trace import DepthTrace


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """Tokens that were fed after a prompt, and the blocks that these ran.

    Attributes:
        tokens: By phase, `think` or `answer`; the last token of an answer is not fed.
        blocks: By phase, of all its tokens together.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)

    @classmethod
    def total(cls, counts: Iterable["PhaseCounts"]) -> "PhaseCounts":
        """All of them together."""
        tokens, blocks = Counter[str](), Counter[str]()
        for each in counts:
            tokens.update(each.tokens)
            blocks.update(each.blocks)
        return cls(dict(tokens), dict(blocks))

    @property
    def depth(self) -> float:
        """Blocks of a token on average; 0 where there is none."""
        return sum(self.blocks.values()) / max(1, sum(self.tokens.values()))

    def fields(self) -> dict[str, Any]:
        """The field of a figure; none where no phase has a budget of its own."""
        phases = {
            name: {"tokens": tokens, "blocks_executed": self.blocks[name]}
            for name, tokens in sorted(self.tokens.items())
        }
        return {"phases": phases} if phases else {}


def count_phases(
    budget: ResolvedBudget,
    trace: DepthTrace,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[PhaseCounts]:
    """What each row of a generation ran; nothing where thinking has no budget of its own.

    Args:
        budget: Of all rows.
        trace: Of that generation alone.
        prompts: Token ids of each row; pads may be among them.
        answers: What was written after each, of which the last token is not fed.
    """
    marks = budget.marks
    if marks is None:
        return [PhaseCounts() for _ in answers]
    counts = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens, blocks = Counter[str](), Counter[str]()
        thought = marks.are_thought(answer[:-1], is_open=marks.is_open(prompt))
        for step, is_thought in zip(trace.steps[1:], thought, strict=False):
            executed = step.executed[row]
            if executed:  # a row that has ended takes no part
                phase = budget.phase(is_prompt=False, is_thought=is_thought)
                tokens[phase] += 1
                blocks[phase] += executed
        counts.append(PhaseCounts(dict(tokens), dict(blocks)))
    return counts
