"""What a model is composed of: backbone, parts of routing, and the policy that chooses blocks."""

from typing import Any, Unpack, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import adapter_fingerprint, base_fingerprint, part_fingerprint
from buddy.backbone.quantised import is_quantised, quantisation_of
from buddy.checkpoint.card import Card
from buddy.checkpoint.parts import (
    ModelParts,
    Origin,
    RoutingParts,
    base_of_adapted,
    check_names,
    describe_module,
    trained_modules,
)
from buddy.checkpoint.save import written_policy
from buddy.depth.policy import DepthPolicy, Policy, PolicyResources, check_is_policy
from buddy.depth.prior import Prior
from buddy.engine.executors.choice import EngineName, ExecutorChoice
from buddy.engine.fork_guard import check_threads
from buddy.engine.state.cache import DEFAULT_KV_POLICY, KVPolicy, check_kv_policy
from buddy.engine.tabulate import Tabulator
from buddy.errors import PolicyError
from buddy.generation.budgets import check_predictor
from buddy.policies.learned import LearnedPart
from buddy.policies.registry import build_policy


class ComposedModel(nn.Module):
    """A backbone, the trained parts beside it, and who chooses the blocks that run."""

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: str | Policy | None = None,
        kv_policy: KVPolicy = DEFAULT_KV_POLICY,
        engine: EngineName = "auto",
        origin: Origin | None = None,
        card: Card | None = None,
        **routing: Unpack[RoutingParts],
    ) -> None:
        check_threads()
        check_names(routing)
        super().__init__()
        self._policy: Policy
        self.policy_spec: str | None
        self.model = model
        self.router, self.predictor = routing.get("router"), routing.get("predictor")
        check_predictor(self.predictor, self.router)
        self.ledger, self.learned = routing.get("ledger"), routing.get("learned")
        self.depth_scales = routing.get("depth_scales")
        prior = routing.get("prior")
        self._prior = Prior(prior) if isinstance(prior, Tensor) else prior
        self.kv_policy = check_kv_policy(kv_policy)
        self.origin = origin or Origin()
        self.card = card
        self.backbone = Backbone(base_of_adapted(model))
        self.backbone.depth_scales = self.depth_scales
        self.config = self.backbone.config
        self.generation_config = cast(Any, model.generation_config)
        made_for = self.num_blocks if self.router is None else self.router.config.num_blocks
        if made_for != self.num_blocks:  # whether it is the policy or not
            raise PolicyError(
                f"the router is made for {made_for} blocks and the model has {self.num_blocks}: "
                "use one made for this model"
            )
        self.set_policy(self.default_policy() if policy is None else policy)
        self.executor = ExecutorChoice(self.backbone, engine)
        self._tabulate = Tabulator(self.backbone)

    def _apply(self, *args: Any, **options: Any) -> "ComposedModel":
        """Move or convert all weights, as `to` and its kin do."""
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]  # torch's own
        self.backbone.locate()
        return self

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out, and all weights are, if they are not spread."""
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' number format."""
        return self.backbone.dtype

    @property
    def num_blocks(self) -> int:
        """Transformer blocks of the model."""
        return self.backbone.num_blocks

    @property
    def resources(self) -> PolicyResources:
        """What the model offers to a policy."""
        return PolicyResources(
            num_blocks=self.num_blocks,
            fingerprint=self.base_fingerprint,
            prior=self._prior,
            router=self.router,
            learned=self.learned,
            backbone=self.backbone,
        )

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the base model's weights, whatever adapter is on them or was folded in."""
        if self.device.type == "meta":  # an outline has no weights; a checkpoint's says whose it is
            return self.origin.fingerprint
        if self.origin.fingerprint is not None and (
            self.origin.merged_adapter or is_quantised(self.model)
        ):
            return self.origin.fingerprint
        return base_fingerprint(self.model)

    def facts(self) -> dict[str, Any]:
        """What tells this model from others, for records: blocks, and fingerprints of its parts."""
        facts = {"num_blocks": self.num_blocks, "base": self.base_fingerprint}
        adapter = self.origin.merged_adapter or adapter_fingerprint(self.model)
        if adapter is not None:
            facts["adapter"] = adapter
        quant = quantisation_of(self.model) or self.origin.quant
        if quant is not None:
            facts["quant"] = quant
        for name, part in trained_modules(self.routing).items():
            facts[name] = part_fingerprint(part.state_dict(), describe_module(part))
        if self._prior is not None and self._prior.fingerprint is not None:
            facts["prior"] = self._prior.fingerprint
        return facts

    @property
    def routing(self) -> RoutingParts:
        """What routing knows of the blocks now; training puts new parts in."""
        return {
            "prior": self._prior,
            "router": self.router,
            "predictor": self.predictor,
            "ledger": self.ledger,
            "learned": self.learned,
            "depth_scales": self.depth_scales,
        }

    @property
    def parts(self) -> ModelParts:
        """All that a checkpoint keeps."""
        return ModelParts(
            hf_model=self.model,
            backbone=self.backbone,
            routing=self.routing,
            policy=written_policy(self.policy, self.policy_spec),
            kv_policy=self.kv_policy,
            origin=self.origin,
            card=self.card,
        )

    @property
    def prior(self) -> Float[Tensor, " middle"] | None:
        """Normalised importance of the middle blocks; measured now, if that is still to be done."""
        return None if self._prior is None else self._prior.values()

    @property
    def prior_facts(self) -> dict[str, Any] | None:
        """Source and hash of the prior, for records; None while it is not known."""
        return None if self._prior is None else self._prior.facts()

    @property
    def policy(self) -> Policy:
        """Who chooses the blocks; `set_policy` changes it."""
        return self._policy

    @property
    def scoring_policy(self) -> DepthPolicy:
        """The policy, where budgets are to be spent on scores.

        Raises:
            PolicyError: It decides while it runs, and scores no blocks.
        """
        if not isinstance(self._policy, DepthPolicy):
            raise PolicyError(
                f"policy {self._policy.name!r} decides while it runs and keeps no budget: name one "
                "that scores blocks, such as static or routed"
            )
        return self._policy

    def inference_policy(self) -> Policy:
        """The policy; without gradients, from a token table where it gives the same plans."""
        return self._tabulate(self._policy)

    def set_policy(self, policy: str | Policy) -> None:
        """Choose blocks by another policy from now on.

        Args:
            policy: `"NAME"`, `"NAME:ARGUMENT"` or an object; a checkpoint keeps names alone.

        Raises:
            PolicyError: There is no such policy, or it cannot serve this model.
        """
        if isinstance(policy, str):
            chosen, spec = build_policy(policy, self.resources), policy
        else:
            chosen, spec = check_is_policy(policy), None
        if chosen.num_blocks != self.num_blocks:
            raise PolicyError(
                f"the policy, or the prior or router behind it, is made for {chosen.num_blocks} "
                f"blocks and the model has {self.num_blocks}: use one made for this model"
            )
        if self.depth_scales is not None and (chosen.is_online or chosen.context_layer > 1):
            raise PolicyError(
                f"policy {chosen.name!r} does not say after the first block how many blocks a "
                "token runs, and this model's adapters know it: name a policy that does, such as "
                "static or routed, or a model that was trained without lora.depths"
            )
        self._policy, self.policy_spec = chosen, spec

    def put_part(self, part: LearnedPart) -> None:
        """Take in a method's trained part, and let its policy choose from now on.

        Raises:
            PolicyError: It cannot serve this model.
        """
        self.learned = part.to(self.device)
        self.set_policy(part.policy)

    def default_policy(self) -> str:
        """A method's trained part, else the router, else the prior's static order, else full."""
        if self.learned is not None:
            return self.learned.policy
        if self.router is not None:
            return "routed"
        return "full" if self._prior is None else "static"
