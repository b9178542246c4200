"""Do seeds hold in company? Drawn answers of requests with a seed, alone and in a loaded engine.

Requests with a seed come at random times among as many without one. Each is asked again by itself,
after all others, of the same engine. Its tokens and its log-probabilities must be the same bits.

    python benchmarks/seeds.py --out results/serving/seeds-bfloat16.json
    python benchmarks/seeds.py --quant int8 --out results/serving/seeds-int8.json
    BUDDY_NATIVE=avx512 python benchmarks/seeds.py --out runs/seeds.json
    python benchmarks/seeds.py --engine general --prompt 48 --new-tokens 3 --out runs/seeds.json
"""

import random
import threading
import time

from rich.progress import track

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.budget.resolved import ResolvedBudget
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment
from buddy.serving.request import Delta, Finished, GenerationRequest, Sampling
from buddy.serving.rows.engine import ServingThread
from buddy.serving.rows.options import BatcherOptions


class Answer:
    """Collects what an answer gives."""

    def __init__(self):
        self.events, self._over = [], threading.Event()

    def __call__(self, event):
        """Take an event."""
        self.events.append(event)
        if not isinstance(event, Delta):
            self._over.set()

    def bits(self):
        """Its text, tokens and log-probabilities, once it has ended."""
        self._over.wait()
        assert isinstance(self.events[-1], Finished), self.events[-1]
        deltas = [event for event in self.events if isinstance(event, Delta)]
        return [(delta.text, delta.tokens, delta.logprobs) for delta in deltas]


def drawn(args, model, draw, seed):
    """A request with random tokens of one of few beginnings, at a random depth."""
    vocab = model.backbone.embedding.num_embeddings
    beginning = random.Random(draw.randrange(4)).choices(range(vocab), k=args.prompt)
    shared, own = draw.randrange(args.prompt), draw.randint(1, args.prompt)
    prompt = (*beginning[:shared], *draw.choices(range(vocab), k=own))[: args.prompt]
    blocks = draw.randint(model.num_blocks // 3, model.num_blocks)
    return GenerationRequest(
        prompt=prompt,
        max_tokens=args.new_tokens,
        budget=ResolvedBudget(kind="fixed", least=blocks, most=blocks),
        sampling=Sampling(temperature=0.8, top_p=0.95, seed=seed),
        top_logprobs=3,
        ignore_eos=True,
    )


def main():
    """Ask, compare, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", default=ROUTED_MODEL)
    parser.add_argument("--engine", default="auto", choices=("auto", "native", "general"))
    parser.add_argument("--quant", choices=("int8", "int4"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=8.0, help="of both kinds, in a second")
    parser.add_argument("--prompt", type=int, default=200, help="most tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(
        args.model, merge_adapter=True, engine=args.engine, quant=args.quant
    )
    tokenizer, draw = load_tokenizer(args.model), random.Random(0)
    engine = ServingThread(model, tokenizer, "seeds", options=BatcherOptions(rows=args.rows))
    seeded = [drawn(args, model, draw, seed) for seed in range(args.requests)]
    company = [Answer() for _ in seeded]
    for request, answer in zip(track(seeded, "in company"), company, strict=True):
        time.sleep(draw.expovariate(args.rate / 2))
        for asked, deliver in ((request, answer), (drawn(args, model, draw, None), Answer())):
            engine.submit(asked, deliver)
    bits = [answer.bits() for answer in company]
    same = []
    for request, expected in zip(track(seeded, "alone"), bits, strict=True):
        alone = Answer()
        engine.submit(request, alone)
        same.append(alone.bits() == expected)
    cached = sum(answer.events[-1].usage.cached_tokens for answer in company)
    engine.close(10.0)
    results = {
        "requests": len(same),
        "same": sum(same),
        "tokens": sum(map(len, bits)),
        "cached_tokens": cached,
        "engine": model.executor.describe(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    experiment.show("Seeds", list(results), [list(results.values())])
    experiment.save(args.out, "serving-seeds", results, config=args)


if __name__ == "__main__":
    experiment.run(main)
