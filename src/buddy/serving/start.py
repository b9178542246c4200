"""Start of the engine behind a server: the one place that knows of what it is made."""

from typing import Any

from buddy.engine.steer import BatchRoute
from buddy.generation.options import end_at_turns
from buddy.inference import InferenceModel
from buddy.serving.client import EngineClient
from buddy.serving.control.admission import AdmissionConfig
from buddy.serving.control.controller import ControlConfig, Controller
from buddy.serving.control.metrics import ServingMetrics
from buddy.serving.rows.calibrate import cost_of
from buddy.serving.rows.engine import ServingThread
from buddy.serving.rows.options import BatcherOptions


def start_engine(
    model: InferenceModel,
    tokenizer: Any,
    name: str,
    config: ControlConfig,
    admission: AdmissionConfig,
    *,
    batch_route: BatchRoute = "independent",
) -> EngineClient:
    """Measure what a step costs, and start a thread that takes requests.

    Args:
        model: Its weights and its policy must not change from now on.
        tokenizer: The model's.
        name: Of the model, as clients say it.
        config: What the server promises and has room for.
        admission: When requests are refused.
        batch_route: Whose scores rank the blocks of a pass.
    """
    end_at_turns(model, tokenizer)
    rows = config.max_rows
    control = Controller(
        config,
        cost_of(model, rows, batch_route=batch_route),
        ServingMetrics(name, model.num_blocks, rows),
        admission,
    )
    options = BatcherOptions(rows=rows, batch_route=batch_route)
    return ServingThread(model, tokenizer, name, control=control, options=options)
