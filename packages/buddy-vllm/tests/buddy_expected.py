"""What Buddy's own engine says of tiny models, and their exports: buddy_expected.py FOLDER.

Run by an interpreter that has Buddy. Writes FOLDER/<name>/ by `buddy export` and
FOLDER/expected.json.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.cli.main import app
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.planner import PlannerConfig
from buddy.routing.router import Router, RouterConfig

VOCAB = 256
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama-routed": (LlamaConfig(**SIZES, attention_bias=True), "routed", {}),
    "llama-ema": (LlamaConfig(**SIZES), "routed", {"summary": "ema", "ema_decay": 0.7}),
    "qwen2-routed": (Qwen2Config(**SIZES), "routed", {"summary": "mean+last"}),
    "qwen2-static": (Qwen2Config(**SIZES, tie_word_embeddings=True), "static:4,2,1,5,3", {}),
}
BUDGETS = (0.5, "3 blocks", "auto", 1.0, "5 blocks", 0.9)
NEW = 12


def made(config, planner):
    """A random model in which each block matters, a router and a predictor."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    router = Router(RouterConfig(num_blocks=7, token_width=128, planner=PlannerConfig(**planner)))
    predictor = BudgetPredictor(router.config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.06 if parameter.ndim > 1 else 0.3
            parameter.add_(torch.randn_like(parameter) * scale)
        for parameter in [*router.parameters(), *predictor.parameters()]:
            scale = 1.0 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * scale)
    return BuddyForCausalLM(model, router=router, predictor=predictor)


def answered(model, ids, budget):
    """Tokens that Buddy generates under the prompt's plan, and the blocks of that plan."""
    given = torch.tensor([ids])
    with torch.no_grad():
        plan = model(given, budget=budget).plan.executed_sets[0]
        out = model.generate(
            given, budget=budget, reroute="prefill", max_new_tokens=NEW, do_sample=False
        )
    return {"blocks": list(plan), "tokens": out[0, len(ids) :].tolist()}


def main(folder):
    """Write exports and what is expected of them."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    generator = torch.Generator().manual_seed(3)
    expected = {}
    for name, (config, policy, planner) in MODELS.items():
        checkpoint = folder / "checkpoints" / name
        made(config, planner).save_pretrained(checkpoint, tokenizer=tokenizer)
        arguments = ["export", str(checkpoint), "--out", str(folder / name), "--policy", policy]
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        model = BuddyForCausalLM.from_pretrained(checkpoint, policy=policy, engine="general")
        expected[name] = []
        for row in range(24):
            length = int(torch.randint(1, 50, (), generator=generator))
            ids = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
            budget = BUDGETS[row % len(BUDGETS)]
            said = answered(model, ids, budget)
            expected[name].append({"ids": ids, "budget": budget, **said})
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
