"""Engines for tests: each runs in a process of its own, with few threads and a small cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

PLAIN = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_OPTIONS = {
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**26,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "block_size": 32,
    "seed": 0,
}


def environment(ranks=1):
    """One core for each rank; vLLM would keep one for itself."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    bound = ",".join(cores[:2]) if ranks == 1 else "|".join(cores[:ranks])
    return {
        **os.environ,
        "OMP_NUM_THREADS": "2" if ranks == 1 else "1",
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        # In one process, what the worker counted can be read; ranks are processes of their own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def run_engine(model, work, batches, *, plain=None, ranks=1, **options):
    """What an engine answers to batches of requests, one after the other.

    `plain` names a family, and vLLM's own class serves the same weights.
    """
    whole = {**_OPTIONS, **options}
    if plain is not None:
        whole["hf_overrides"] = {"architectures": [PLAIN[plain]]}
        batches = [
            [{k: v for k, v in request.items() if k != "budget"} for request in b] for b in batches
        ]
    work.mkdir(parents=True, exist_ok=True)
    asked, said = work / "asked.json", work / "said.json"
    asked.write_text(json.dumps({"model": str(model), "options": whole, "batches": batches}))
    script = Path(__file__).parent / "engine_run.py"
    done = subprocess.run(
        [sys.executable, str(script), str(asked), str(said)],
        env=environment(ranks),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(said.read_text())
