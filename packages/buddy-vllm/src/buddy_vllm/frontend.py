"""The front end's part: a request's budget becomes a plan, or an answer with status 400."""

from typing import Any, Final

from buddy_vllm import adapter
from buddy_vllm.batch import KEY
from buddy_vllm.errors import BudgetError
from buddy_vllm.plan import Planner
from buddy_vllm.statistics import Account, asked, totals

BUDGET: Final = "budget"
"""Name in `vllm_xargs` of a request, and in `SamplingParams.extra_args`."""
_NUM_BLOCKS: Final = "buddy_num_blocks"


def install() -> None:
    """Have every request planned in the front end, and its end told."""
    adapter.wrap_front_end(begin, admit)
    adapter.wrap_outputs(open_account, close_account)


def begin(vllm_config: Any) -> Planner | None:
    """What plans an engine's requests; None for a model that is not ours.

    Raises:
        ExportError: The model's folder is no export, or has changed.
    """
    if not adapter.is_ours(vllm_config):
        return None
    adapter.wrap_beam_search(refuse_budget)
    return Planner.of_folder(adapter.model_folder(vllm_config))


def admit(planner: Planner, request: Any, is_partial: bool) -> Any:
    """Plan a request: its blocks go into `extra_args`, and its cache gets a salt of its own.

    Args:
        planner: Of the model.
        request: As vLLM made it.
        is_partial: Whether more of its prompt is to come.

    Raises:
        VLLMValidationError: Its budget cannot be read or spent; HTTP answers 400.
    """
    params = request.sampling_params
    if params is None:  # pooling, which has no budget
        return request
    extra = params.extra_args or {}
    budget = extra.get(BUDGET)
    if BUDGET in extra and budget is None:
        raise adapter.invalid("budget is null: leave it out for full depth", BUDGET)
    if is_partial and budget is not None:
        raise adapter.invalid("a prompt that arrives in parts has no budget: leave it out", BUDGET)
    try:
        plan = planner.plan(budget, request.prompt_token_ids)
    except BudgetError as error:
        raise adapter.invalid(str(error), BUDGET) from error
    salt = plan.salt(request.cache_salt, planner.revision)
    said = {KEY: list(plan.blocks), _NUM_BLOCKS: plan.num_blocks}
    return adapter.with_plan(request, said, salt)


def refuse_budget(extra: Any) -> None:
    """Refuse a budget for what is not planned: a beam search runs at full depth.

    Raises:
        VLLMValidationError: There is a budget among the request's `vllm_xargs`.
    """
    if BUDGET in (extra or {}):
        raise adapter.invalid("a beam search has no budget: leave one of the two out", BUDGET)


def open_account(request: Any, earlier: Any) -> Account | None:
    """The account of an answer that begins; None for a model that is not ours.

    Args:
        request: As it goes to the engine.
        earlier: The account of an earlier answer to the same prompt, or None.
    """
    params = request.sampling_params
    extra = (params.extra_args or {}) if params is not None else {}
    if KEY not in extra:
        return None
    account: Account = earlier or Account(len(extra[KEY]), extra[_NUM_BLOCKS])
    account.open += 1
    collected = asked.get()
    if collected is not None and earlier is None:
        collected.append(account)
    return account


def close_account(account: Account, fed: int, output: Any) -> None:
    """Note what an answer took, when it ends."""
    account.open -= 1
    account.tokens += fed
    totals.add(account, fed)
    adapter.logger().debug(
        "an answer ran %d of %d blocks over %d tokens", account.blocks, account.num_blocks, fed
    )
    if output is not None:
        output.buddy = account.report()
