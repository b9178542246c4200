"""BuddyForCausalLM: a causal LM that runs under a budget, with transformers' own `generate`."""

from pathlib import Path
from typing import Any, Unpack, cast

import torch

from buddy.checkpoint.load import LoadOptions, load_parts, outline_parts
from buddy.checkpoint.resolve import ModelName, resolve
from buddy.checkpoint.save import save
from buddy.engine.executors.choice import EngineName
from buddy.engine.fork_guard import check_threads
from buddy.engine.state.cache import KVPolicy
from buddy.errors import ModelError
from buddy.generation.generate import BudgetedGeneration
from buddy.hub.progress import OnFetch
from buddy.hub.safe_paths import user_path
from buddy.inference import InferenceModel
from buddy.pretrained import Pretrained


class BuddyForCausalLM(InferenceModel, Pretrained, BudgetedGeneration):
    """Runs exactly as many blocks as each row's budget says, chosen by a policy.

    Args:
        model: A Hugging Face causal LM of a supported family, bare or wrapped by PEFT.
        policy: `"NAME"`, `"NAME:ARGUMENT"` or a policy object. By default that of the trained
            part, else the trained router, else the prior's static order, else full depth.
        kv_policy: What a skipped block leaves in its KV cache.
        engine: Who runs decode steps: "native" (compiled code on a CPU, CUDA graphs on a GPU),
            "general" (the Hugging Face modules) or "auto", native where it can be.
        origin: Where the weights come from; needed to save a checkpoint without them.
        card: The model card that goes with a checkpoint.
        **routing: `prior`, `router`, `predictor`, `ledger` and `learned`; see
            `checkpoint.parts.RoutingParts`.

    Raises:
        FamilyError: The architecture is not supported.
        PolicyError: The policy cannot serve this model, or the predictor the router.
    """

    @classmethod
    def from_pretrained(
        cls,
        name: ModelName,
        *,
        engine: EngineName = "auto",
        device_map: str | torch.device | None = None,
        **options: Unpack[LoadOptions],
    ) -> "BuddyForCausalLM":
        """Load a model by preset name, hub id, folder, GGUF file or Buddy checkpoint.

        Args:
            name: As `buddy generate --model` takes it.
            engine: As for the constructor.
            device_map: What transformers calls `device`; "auto" and "balanced" are all of CUDA.
            **options: `dtype`, `device`, `attention`, `policy`, `kv_policy`, `merge_adapter`,
                `quant`, `on_progress`: see `checkpoint.load.LoadOptions`.

        Raises:
            ModelError: It cannot be found, fetched or understood; or its device is named twice.
            FamilyError: Its family is not supported, or it is not computed as transformers does.
            CheckpointError: It is truncated, foreign or unsafe.
        """
        check_threads()
        if device_map is not None:
            if options.get("device") is not None:
                raise ModelError(
                    f"device {options['device']!r} and device_map {device_map!r} are two names "
                    "for one thing: leave one out"
                )
            options["device"] = device_map
        named = resolve(name)
        parts = load_parts(named, **options)
        return cast(BuddyForCausalLM, cls.of_parts(parts, engine, named))

    @classmethod
    def outline(
        cls,
        name: ModelName,
        *,
        policy: str | None = None,
        kv_policy: KVPolicy | None = None,
        engine: EngineName = "auto",
        on_progress: OnFetch | None = None,
    ) -> "BuddyForCausalLM":
        """Describe a model before its weights are fetched; this one runs nothing.

        It takes what `from_pretrained` takes, and refuses what the model itself would refuse.

        Raises:
            BuddyError: As `from_pretrained`, and as the constructor.
        """
        named = resolve(name)
        parts = outline_parts(named, policy=policy, kv_policy=kv_policy, on_progress=on_progress)
        return cast(BuddyForCausalLM, cls.of_parts(parts, engine, named))

    def save_pretrained(
        self, folder: str | Path, *, include_backbone: bool | None = None, tokenizer: Any = None
    ) -> None:
        """Write a Buddy checkpoint: safetensors and JSON, the PEFT adapter in its own folder.

        Args:
            folder: Made, or replaced if it holds a Buddy checkpoint.
            include_backbone: Write the backbone's weights too. By default only where the model
                was not loaded from a place that it can be loaded from again, or has changed.
            tokenizer: Written too. A checkpoint with its own backbone has no other.

        Raises:
            CheckpointError: The folder holds something else or cannot be written, or the model
                could not be loaded again.
        """
        save(self.parts, user_path(folder), include_backbone=include_backbone, tokenizer=tokenizer)


# Lanes and plans are another shape at every step: a compiler would start anew each time.
BuddyForCausalLM.forward = torch.compiler.disable(BuddyForCausalLM.forward)  # type: ignore[method-assign,no-untyped-call]
