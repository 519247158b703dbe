"""A scripted pair that reacts to the conversation: it thinks for two steps, calls tools and follows JSON schemas.

Its chat template writes the request as one line of JSON, which the engine parses back from its prompt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scripted import Call, Opinion, Reply, ScriptedEngine, WordTokenizer

from stepspec.api.models import Pair

TEMPLATE = """\
{{ {"messages": messages, "tools": tools} | tojson }}
{% if messages[-1].tool_calls is defined %}<tool_call>{% endif %}{% if add_generation_prompt %}<|assistant|>\
{% if thinks %}<think>{% endif %}{% endif %}"""

THOUGHTS = ("What is asked is clear.\n\n", "Nothing else is needed.\n\n")


class FollowingEngine(ScriptedEngine):
    """The target or the draft; both think the same. The engine waits `delay_s` before each reply."""

    def __init__(self, tokenizer: WordTokenizer, name: str, **settings: Any) -> None:
        self.delay_s = settings.pop("delay_s", 0.0)
        self.chunk_size = settings.pop("chunk_size", 3)
        self.hangs = settings.pop("hangs", False)
        super().__init__(tokenizer, name=name, **settings)
        (self._think_end,) = tokenizer.encode("</think>")[:1]

    def _reply_to(self, call: Call) -> Reply:
        head, _, written = call.prompt.partition("<|assistant|>")
        request = json.loads(head.partition("\n")[0])
        thought, ended, said = written.removeprefix("<think>").partition("</think>")
        if written.startswith("<think>") and not ended:
            text = "".join([*THOUGHTS, "</think>"])[len(thought) :]
            if call.stop is not None and self._think_end not in call.stop.token_ids:
                text += f"{answer(request, call.json_schema)}<|end|>"
        else:
            text = f"{answer(request, call.json_schema)}<|end|>"
            text = text.removeprefix(said if ended else written)  # a model without separate thinking only says
        return Reply(text, hangs=self.hangs, delay_s=self.delay_s, chunk_size=self.chunk_size)

    def _opinion_on(self, call: Call) -> Opinion:
        head, assistant, written = call.prompt.partition("<|assistant|>")
        if not assistant:  # the prompt itself is scored
            return Opinion(call.continuation)
        text = f"{answer(json.loads(head.partition(chr(10))[0]), None)}<|end|>"
        if written.startswith("<think>"):
            text = "".join(["<think>", *THOUGHTS, "</think>", text])
        text = text.removeprefix(written)
        if not text.startswith(call.continuation):
            text = call.continuation
        return Opinion(text, hangs=self.hangs, delay_s=self.delay_s)


def answer(asked: Mapping[str, Any], schema: str | None) -> str:
    """Return JSON that fits the schema, calls to the tools that the last message mentions, or a sentence."""
    last, tools = asked["messages"][-1], asked["tools"] or []
    if schema is not None:
        form = json.loads(schema)
        return json.dumps(instance(form, form, last["content"]), ensure_ascii=False)
    if last["role"] == "tool":
        results = [turn["content"] for turn in asked["messages"] if turn["role"] == "tool"]
        return f"\n\nIt is {', '.join(results)}."
    named = [tool["function"] for tool in tools if is_spoken_of(tool["function"]["name"], last["content"])]
    calls = [{"name": each["name"], "arguments": arguments(each, last["content"])} for each in named]
    written = "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
    return written or f"\n\nYou said {len(asked['messages'])} things, {last['content']} among them."


def is_spoken_of(name: str, said: str) -> bool:
    """Return whether the text `said` contains a word of the tool's name."""
    return any(word in said.lower() for word in name.lower().split("_") if len(word) > 2)


def arguments(function: Mapping[str, Any], said: str) -> Any:
    """Return arguments for a call of the function, taken from the text `said`."""
    form = function.get("parameters") or {"type": "object"}
    return instance(form, form, said)


def instance(form: Mapping[str, Any], root: Mapping[str, Any], said: str) -> Any:
    """Return a value that fits the schema `form`, made of numbers and quoted words in the text `said`."""
    if "$ref" in form:
        found: Any = root
        for name in form["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return instance(found, root, said)
    if "const" in form:
        return form["const"]
    if "enum" in form:
        return form["enum"][0]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in form:
            return instance(form[keyword][0], root, said)
    kind = form.get("type", "object")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        properties = form.get("properties") or {
            key: {"type": "integer" if re.search(r"\d", said) else "string"}
            for key in re.findall(r"['`](\w+)['`]", said)
        }
        return {name: instance(each, root, said) for name, each in properties.items()}
    if kind == "array":
        return [instance(form.get("items", {"type": "string"}), root, said)]
    numbers = re.findall(r"-?\d+", said)
    quoted = re.findall(r"'([^']+)'", said)
    plain: Mapping[str, Any] = {
        "integer": int(numbers[0]) if numbers else 1,
        "number": float(numbers[0]) if numbers else 1.0,
        "boolean": True,
        "null": None,
        "string": quoted[0] if quoted else "word",
    }
    return plain[kind]


def following_pair(*, thinks: bool = True, **settings: Any) -> Pair:
    """Return a target and a draft that share a tokenizer."""
    tokenizer = WordTokenizer(TEMPLATE.replace("thinks", str(thinks).lower()), tags=thinks)
    target = FollowingEngine(tokenizer, settings.pop("name", "target"), **settings)
    return Pair(target, FollowingEngine(tokenizer, "draft", **settings))


def asked_of(engine: object) -> Sequence[Mapping[str, Any]]:
    """Return the messages of the last request that the engine received."""
    assert isinstance(engine, FollowingEngine)
    return json.loads(engine.calls[-1].prompt.partition("\n")[0])["messages"]
