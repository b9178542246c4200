"""Are the calls that a model must make valid: do their arguments follow the schema of the function?

Fifty questions to a server of its own, each with five tools: for half of them the model chooses
which to call (`required`), for half the request names it. Arguments are checked by a validator that
has no part in the grammar. Beside it stands how often the tool called was the one asked about.

    python benchmarks/tool_calls.py --model FILE.gguf --out results/serving/tool-calls.json
"""

import json

import httpx
import jsonschema_rs
from served import served

from buddy.lab import experiment

TEXT, COUNT = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 500}
DAY = {"type": "string", "pattern": r"^20\d\d-\d\d-\d\d$"}


def tool(name, description, **properties):
    """A function as OpenAI describes it; every property is required."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    about = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": about}


TOOLS = [
    tool("weather", "The weather of a place on a day.", place=TEXT, day=DAY),
    tool(
        "convert",
        "Converts an amount of money.",
        amount={"type": "number"},
        source={"enum": ["EUR", "USD", "GBP", "JPY"]},
        target={"enum": ["EUR", "USD", "GBP", "JPY"]},
    ),
    tool("book_table", "Books a table at a restaurant.", restaurant=TEXT, guests=COUNT, day=DAY),
    tool(
        "send_message",
        "Sends a message to people.",
        text=TEXT,
        to={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4},
    ),
    tool(
        "set_lights",
        "Sets the lights of rooms.",
        rooms={
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"room": TEXT, "level": COUNT, "is_on": {"type": "boolean"}},
                "required": ["room", "level", "is_on"],
                "additionalProperties": False,
            },
        },
    ),
]
QUESTIONS = {
    "weather": [
        "What is the weather in Lisbon on 2026-12-01?",
        "Will it rain in Oslo on 2027-01-05?",
    ],
    "convert": ["How many dollars are 250 euros?", "Convert 9000 yen into pounds."],
    "book_table": [
        "Book a table for four at Chez Paul on 2026-12-24.",
        "We are 7 and want to eat at Sakura on 2027-02-02.",
    ],
    "send_message": [
        "Tell Ann and Bob that I am late.",
        "Write to Carla: the keys are on the table.",
    ],
    "set_lights": ["Turn off the lights in the kitchen and the hall.", "Dim the bedroom to 20."],
}


def ask(client, model, name, question, *, is_named, seed):
    """Whether the arguments are valid, and whether the tool is the question's own."""
    named = {"type": "function", "function": {"name": name}}
    reply = client.post(
        "/v1/chat/completions",
        json={
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "tools": TOOLS,
            "tool_choice": named if is_named else "required",
            "parallel_tool_calls": False,
            "temperature": 0.7,
            "seed": seed,
            "max_tokens": 300,
        },
    ).raise_for_status()
    (choice,) = reply.json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    is_valid = choice["finish_reason"] == "tool_calls" and len(calls) == 1
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        is_valid &= jsonschema_rs.is_valid(schemas[call["function"]["name"]], arguments)
    return is_valid, bool(calls) and calls[0]["function"]["name"] == name


def main():
    """Ask, count, and write the record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--budget", default="1.0")
    args = parser.parse_args()
    asked = [(name, text) for name, texts in QUESTIONS.items() for text in texts]
    counts = {}
    with (
        served(args.model, "--default-budget", args.budget) as (address, _),
        httpx.Client(base_url=address, timeout=300) as client,
    ):
        model = client.get("/v1/models").json()["data"][0]["id"]
        for is_named in (False, True):
            found = [
                ask(client, model, name, text, is_named=is_named, seed=seed)
                for seed, (name, text) in enumerate((asked * 3)[:25])
            ]
            counts["named" if is_named else "required"] = {
                "requests": len(found),
                "valid": sum(is_valid for is_valid, _ in found),
                "own_tool": sum(is_own for _, is_own in found),
            }
            print(counts)
    experiment.save(args.out, "tool-calls", counts, config=experiment.values(args))


if __name__ == "__main__":
    experiment.run(main)
