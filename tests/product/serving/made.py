"""A tiny model with a byte-level tokenizer, requests, and what they are told."""

import copy

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from buddy import BuddyForCausalLM
from buddy.serving.control.protocol import NoControl
from buddy.serving.request import Delta, Failed, Finished, GenerationRequest, Sampling
from buddy.serving.rows.batcher import Batcher
from buddy.serving.rows.options import BatcherOptions
from buddy.serving.rows.row import Submitted
from tests.budgets import fixed
from tests.tiny import CONFIGS, random_predictor, random_router

END = 256
VOCAB = 264
"""Bytes, an end of text, and logits that no token stands for."""


def byte_tokenizer():
    """A token for each byte, and a few of two bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(letters)}
    merges = [("h", "e"), ("l", "l"), ("Ã", "©")]
    for at, pair in enumerate(merges):
        vocab["".join(pair)] = END + 1 + at
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"</s>": END}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def fallback_tokenizer():
    """A few words and letters; a token for each byte of all else, as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", *"abdelorwH!"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_buddy(
    policy=None,
    *,
    kv_policy="lazy",
    predictor=False,
    ends=None,
    engine="auto",
    vocab=VOCAB,
    context=128,
    **more,
):
    """A tiny random model whose tokens are bytes, unless it has more of them."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size, config.max_position_embeddings = vocab, context
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = END
    router = random_router(model, **more)
    return BuddyForCausalLM(
        model,
        router=router,
        predictor=random_predictor(router) if predictor else None,
        policy=policy,
        kv_policy=kv_policy,
        engine=engine,
    )


def request(prompt, max_tokens=8, budget=4, **more):
    """A greedy request, unless sampling is named."""
    sampling = {name: more.pop(name) for name in Sampling.__dataclass_fields__ if name in more}
    return GenerationRequest(
        prompt=tuple(int(token) for token in prompt),
        max_tokens=max_tokens,
        budget=fixed(prefill=budget, decode=budget) if isinstance(budget, int) else budget,
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        **more,
    )


class Told:
    """Collects the events of a request."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        assert not self.ended, "nothing follows the last event"
        self.events.append(event)

    @property
    def ended(self):
        return bool(self.events) and not isinstance(self.events[-1], Delta)

    @property
    def deltas(self):
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self):
        return [token for event in self.deltas for token in event.tokens]

    @property
    def text(self):
        return "".join(event.text for event in self.deltas)

    @property
    def runs(self):
        return [runs for event in self.deltas for runs in event.runs]

    @property
    def finished(self):
        assert isinstance(self.events[-1], Finished), self.events[-1]
        return self.events[-1]

    @property
    def failed(self):
        assert isinstance(self.events[-1], Failed), self.events[-1]
        return self.events[-1].message


class Bench:
    """A batcher that is stepped by hand."""

    def __init__(self, buddy=None, *, chunk=256, control=None, ends=(), **options):
        self.buddy = buddy or byte_buddy("static:2,3,4,1")
        self.tokenizer = byte_tokenizer()
        options = {"rows": 8, "least_shared": 2, "slots": 4} | options
        control = control or NoControl(prompt_tokens=chunk)
        self.batcher = Batcher(self.buddy, self.tokenizer, control, BatcherOptions(**options), ends)
        self.number = 0

    def add(self, asked, deliver=None, grammar=None):
        told = deliver or Told()
        self.batcher.add(Submitted(self.number, asked, told, grammar, 0.0))
        self.number += 1
        return told

    def run(self, *asked):
        """Serve these together to their end."""
        told = [self.add(wanted) for wanted in asked]
        while self.batcher.has_work:
            self.batcher.step()
        return told


def prompts(count, seed=0, least=1, most=20):
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(least, most + 1, (count,), generator=draw).tolist()
    return [torch.randint(0, 256, (size,), generator=draw).tolist() for size in sizes]


def alone(buddy, asked):
    """The greedy tokens of a request by `generate`."""
    ids = torch.tensor([asked.prompt])
    out = buddy.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        prefill_budget=f"{asked.budget.prompt} blocks",
        budget=f"{asked.budget.most} blocks",
        max_new_tokens=asked.max_tokens,
        do_sample=False,
    )
    return out[0, ids.shape[1] :].tolist()
