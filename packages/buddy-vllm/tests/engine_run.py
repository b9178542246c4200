"""Runs an engine over batches of requests and writes what came out: engine_run.py IN.json OUT.json.

A process of its own for each engine: one that breaks takes no test run with it.
"""

import json
import sys
from pathlib import Path


def main():
    """Read the engine's options and the batches, run them in turn, write outputs and counts."""
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        asked["model"],
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **asked["options"],
    )
    said = {"batches": []}
    for batch in asked["batches"]:
        prompts = [{"prompt_token_ids": request["ids"]} for request in batch]
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                n=request.get("n", 1),
                extra_args={"budget": request["budget"]} if "budget" in request else None,
            )
            for request in batch
        ]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        said["batches"].append([_said(output) for output in outputs])
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    said["preemptions"] = counts["vllm:num_preemptions"]
    said["tally"] = _tally(llm)
    Path(sys.argv[2]).write_text(json.dumps(said))


def _said(output):
    answer = output.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [
            step[token].logprob
            for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
        ],
        "buddy": getattr(output, "buddy", None),
        "cached": output.num_cached_tokens,
    }


def _tally(llm):
    """Blocks of tokens that the worker counted where they ran; None where it is another process."""
    try:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        return worker.model_runner.buddy_total
    except AttributeError:
        return None


if __name__ == "__main__":
    main()
