"""Tokenizer, context length and weights hash of a Hugging Face model, for all engines.

The tokenizer adapter adds no special tokens, hides none in decoded text, and does not clean up spaces.
"""

import hashlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, cast

import jinja2
import tokenizers
from huggingface_hub import get_session, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils.chat_parsing import ResponseParser

from stepspec.engines import draft_vocabulary
from stepspec.engines.protocol import Sampling
from stepspec.engines.template_form import TemplateForm, find_form
from stepspec.engines.template_trial import GenerationTag
from stepspec.engines.thinking import find_tags
from stepspec.errors import ModelError, StepSpecError, UsageError, reason_of

TRIAL = Path(__file__).with_name("template_trial.py")
TRIAL_S = 60.0
"""Wall-clock limit for the trial of a chat template, in seconds."""

TRIAL_CPU_S = 2
"""CPU time limit for the trial, in seconds."""

MAX_REASON = 200
"""Maximum number of characters that an error quotes from a failed trial."""

USUAL_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
HUB_S = 10.0
"""Timeout for the Hugging Face Hub, in seconds."""


class HuggingFaceTokenizer:
    """Adapter from a transformers tokenizer to `Tokenizer`.

    Attributes:
        own: the transformers tokenizer.
        end_ids: ids of the tokens that end a text.
        end_id: the tokenizer's own end token if it is in `end_ids`, else the lowest of them; None if there is none.
        num_ids: exclusive upper bound of the token ids.
        start_ids: ids that begin every text.
        thinking: how the model marks its thinking; None if it does not.
        template_variables: variables of the chat template that a request may set.
        piece: returns the text of a single token, with a cache.
    """

    def __init__(self, tokenizer: Any, end_ids: frozenset[int], thinking: str | None = None) -> None:
        """`thinking` chooses the format of the model's thinking, see `find_tags`."""
        self.own = tokenizer
        self.end_ids = end_ids
        self.end_id: int | None = (
            tokenizer.eos_token_id if tokenizer.eos_token_id in end_ids else min(end_ids, default=None)
        )
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        self.num_ids = max(len(tokenizer), max(added, default=-1) + 1)  # added ids may leave gaps
        self.piece = lru_cache(maxsize=None)(self._piece)
        self.start_ids = [id for id in tokenizer("").input_ids if id not in end_ids]
        self._marked, self._plain = _encoders(tokenizer)
        self._decode = _decoder(tokenizer)
        names = {name for template in _templates(tokenizer) for name in variables_of(template)}
        self.template_variables = frozenset(names - tokenizer.special_tokens_map.keys())
        self.thinking = find_tags(self, "".join(_templates(tokenizer)), thinking)
        marks = {id for id, token in added.items() if token.special}
        marks |= added.keys() & {*self.thinking.opening, *self.thinking.ending} if self.thinking else set()  # hidden
        self._special_ids = end_ids | marks | set(tokenizer.all_special_ids)
        self.max_token_bytes = _max_token_bytes(tokenizer)
        tags = self.thinking.all_ids if self.thinking is not None else frozenset[int]()
        special = [token for id, token in added.items() if token.special or id in tags]
        self._special = _Finder([token.content for token in special])
        self._normalized = _Finder([self._normal(token.content) for token in special if token.normalized])
        # The backend takes these for text only if they are special.
        plain_tags = [re.escape(added[id].content) for id in tags & added.keys() if not added[id].special]
        self._plain_tags = re.compile(f"({'|'.join(plain_tags)})") if plain_tags else None
        self._form = TemplateForm()
        if tokenizer.chat_template:
            self._form = find_form(lambda turns: self.render(turns, add_generation_prompt=True))

    def _piece(self, token: int) -> str:
        return self.decode([token])

    def special_spans(self, text: str) -> Sequence[tuple[int, int]]:
        spans = list(self._special.spans(text))
        ends = [0, *(end for _, end in spans)]
        starts = [*(start for start, _ in spans), len(text)]
        between = (text[end:start] for end, start in zip(ends, starts, strict=True))
        if self._normalized and any(any(self._normalized.spans(self._normal(each))) for each in between):
            return [(at, at + 1) for at in range(len(text))]  # where they are is not known
        return spans

    def special_edges(self, text: str) -> tuple[bool, bool]:
        begins, ends = self._special.edges(text)
        if self._normalized:
            more = self._normalized.edges(self._normal(text))
            return begins or more[0], ends or more[1]
        return begins, ends

    def _normal(self, text: str) -> str:
        """Return the normalized text. Normalization can create special tokens that the text did not have."""
        normalizer = self.own.backend_tokenizer.normalizer if _is_fast(self.own) else None
        return normalizer.normalize_str(text) if normalizer is not None else text

    def encode(self, text: str) -> list[int]:
        return self._marked(text)

    def encode_text(self, text: str) -> list[int]:
        if self._plain_tags is None or not self._plain_tags.search(text):
            return self._plain(text)
        parts = enumerate(self._plain_tags.split(text))
        chunks = [chunk for index, part in parts for chunk in ((part[:1], part[1:]) if index % 2 else (part,))]
        return [id for chunk in chunks if chunk for id in self._plain(chunk)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = {},
    ) -> str:
        if not self.own.chat_template:
            name = self.own.name_or_path or "The model"
            raise UsageError(f"{name} has no chat template. Add chat_template.jinja beside its weights.")
        try:
            return self.own.apply_chat_template(
                self._form.fitted(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        except Exception as error:  # a template is third-party code and can raise anything
            raise UsageError(f"The model's chat template rejects these messages: {reason_of(error)}.") from error

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        return getattr(self.own, "response_template", None)

    def response_parser(self, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> "CallParser":
        return CallParser(dict(template), prefix="", tools=[dict(tool) for tool in tools])

    def same_vocabulary(self, other: "HuggingFaceTokenizer") -> bool:
        """Return whether both give every token the same id."""
        return self.own.get_vocab() == other.own.get_vocab()


class CallParser(ResponseParser):
    """A response parser that goes on after a region that it cannot parse. The region's value is then the error."""

    @property
    def holds_text(self) -> bool:
        """Whether it holds back text that may become a mark."""
        return self._pos < len(self._buffer)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)  # pyright: ignore[reportUnknownMemberType]
        except (ValueError, KeyError, RecursionError) as error:
            events.append({"type": "region_close", "field": self._current, "value": error})
            self._reset_to_implicit()


def _encoders(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[str], list[int]]]:
    """Return two encoders: one recognizes special tokens, the other treats them as plain text.

    Each has its own backend with fixed settings, so threads can encode concurrently while others use the tokenizer.
    `encode_batch_fast` releases the interpreter lock; `encode` of a backend holds it until it returns.
    """
    # Without a fast backend, or with preprocessing in Python, only the tokenizer itself can encode.
    encode_plus = getattr(tokenizer.__class__, "_encode_plus", None)
    if not _is_fast(tokenizer) or encode_plus is not getattr(TokenizersBackend, "_encode_plus", None):
        return (
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True),
        )
    serialized = tokenizer.backend_tokenizer.to_str()
    marked, plain = tokenizers.Tokenizer.from_str(serialized), tokenizers.Tokenizer.from_str(serialized)
    for each in (marked, plain):
        each.no_truncation()
        each.no_padding()
    marked.encode_special_tokens, plain.encode_special_tokens = False, True
    return (
        lambda text: marked.encode_batch_fast([text], add_special_tokens=False)[0].ids,
        lambda text: plain.encode_batch_fast([text], add_special_tokens=False)[0].ids,
    )


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return the tokenizer's decoding. Where that is its backend's alone, the layers around it are left out: they take
    longer than the decoding of a step."""
    own, plain = tokenizer.__class__, TokenizersBackend
    overridden = any(getattr(own, name, None) is not getattr(plain, name, None) for name in ("decode", "_decode"))
    if _is_fast(tokenizer) and not overridden:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _is_fast(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a backend of the library `tokenizers`."""
    return isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer)


def _max_token_bytes(tokenizer: Any) -> int | None:
    return most_bytes(json.loads(tokenizer.backend_tokenizer.to_str())) if _is_fast(tokenizer) else None


CANDIDATE = 4
"""How many characters of a text are compared with the beginnings of special tokens before the rest is."""


class _Finder:
    """Searches a text for any of many strings, in time that does not depend on their number."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = frozenset(filter(None, strings))
        self._lengths = sorted({len(each) for each in self._strings}, reverse=True)
        begins = sorted({each[:CANDIDATE] for each in self._strings})
        firsts = (f"{re.escape(each[0])}(?={re.escape(each[1:])})" for each in begins)  # the next may overlap
        self._first = re.compile("|".join(firsts)) if begins else None
        self._begun = frozenset(each[:n] for each in self._strings for n in range(1, len(each)))
        self._ended = frozenset(each[n:] for each in self._strings for n in range(1, len(each)))
        self._within = frozenset(part for each in self._strings for part in _whole_words(each))

    def __bool__(self) -> bool:
        return bool(self._strings)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of the strings in the text, from left to right, the longest at each place."""
        end = 0
        for match in self._first.finditer(text) if self._first else ():
            start = match.start()
            if start >= end and (
                found := next((n for n in self._lengths if text[start : start + n] in self._strings), 0)
            ):
                end = start + found
                yield start, end

    def edges(self, text: str) -> tuple[bool, bool]:
        """Return whether the text begins with the end of one of the strings, and ends with the beginning of one.

        Both for a text within one, unless that cuts a word.
        """
        if text in self._within:
            return True, True
        most = min(len(text), self._lengths[0] - 1 if self._lengths else 0)
        return (
            any(text[:n] in self._ended for n in range(1, most + 1)),
            any(text[-n:] in self._begun for n in range(1, most + 1)),
        )


def _whole_words(text: str) -> Iterator[str]:
    """Yield the parts of a text that cut no word."""
    cuts = [at for at in range(len(text) + 1) if not re.fullmatch(r"\w\w", text[at - 1 : at + 1])]
    return (text[start:end] for index, start in enumerate(cuts) for end in cuts[index:])


NFC_SHRINKS = 3
"""NFC normalization shortens a text by at most this factor in UTF-8: three jamo become one syllable."""


def most_bytes(description: Mapping[str, Any]) -> int | None:
    """Return the maximum size of the text of one token, in UTF-8 bytes; None if there is no limit.

    Args:
        description: the content of a `tokenizer.json`.
    """
    model, added = description["model"], description["added_tokens"]
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    steps = _parts(description["normalizer"], "normalizers") + _parts(description["pre_tokenizer"], "pretokenizers")
    kinds = {step["type"] for step in steps}
    if kinds - {"NFC", "Prepend", "Replace", "Split", "Digits", "ByteLevel", "Metaspace"}:
        return None
    if any(step.get("behavior") == "Removed" or (step["type"] == "Replace" and not _widens(step)) for step in steps):
        return None
    added_texts = [token["content"].encode() for token in added]
    if "ByteLevel" in kinds and "Metaspace" not in kinds:  # each character of the vocabulary is a byte
        longest = max(map(len, model["vocab"]), default=1)
    elif model.get("byte_fallback") and "<0x00>" in model["vocab"]:
        longest = max((len(token.replace("\u2581", " ").encode()) for token in model["vocab"]), default=1)
    else:  # text outside the vocabulary may be dropped, or become one token of many characters
        return None
    longest = max(longest, *map(len, added_texts), 1)
    return longest * NFC_SHRINKS if "NFC" in kinds else longest


def _parts(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer as a flat list."""
    if step is None:
        return []
    return [part for each in step[name] for part in _parts(each, name)] if step["type"] == "Sequence" else [step]


def _widens(replacement: Mapping[str, Any]) -> bool:
    """Return whether a replacement step replaces spaces with U+2581, which has more bytes."""
    return replacement["pattern"] == {"String": " "} and replacement["content"] == "\u2581"


@cache
def loading_options(name: str) -> Mapping[str, Any]:
    """Return the options of `from_pretrained` for a model, by Hub name or folder.

    They never trust remote code. If the Hub is unreachable, they use only local files, because requests would take half
    a minute to fail.

    Raises:
        ModelError: there is no such folder, and neither the cache nor the Hub has a model of that name.
    """
    options: dict[str, Any] = {"trust_remote_code": False}
    if Path(name).is_dir():
        return options
    try:
        cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in USUAL_FILES)
    except HFValidationError:
        raise ModelError(f"There is no folder {name!r}, and it is not a valid model name on the Hub.") from None
    if _hub_answers():
        return options
    if cached:
        return options | {"local_files_only": True}
    raise ModelError(
        f"There is no folder {name!r}, no model of that name in the cache, and {ENDPOINT} cannot be reached. "
        "Pass the path of a model folder, or download the model while you are online."
    )


def _hub_answers() -> bool:
    if HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(ENDPOINT, timeout=HUB_S)
    except Exception:  # from httpx or httpx2, by the version of huggingface_hub; an error status does not raise
        return False
    return True


def load_tokenizer(name: str, config: Any = None, thinking: str | None = None) -> HuggingFaceTokenizer:
    """Load the tokenizer of a model.

    Args:
        name: Hub name or folder of the model.
        config: the model's configuration, if it is already loaded.
        thinking: chooses the format of the model's thinking, see `find_tags`.

    Raises:
        UsageError: there is no such thinking format.
        ModelError: the tokenizer cannot be loaded, its chat template fails the trial, or the format of its thinking is
            not known.
    """
    try:
        tokenizer: Any = _load(AutoTokenizer, name)
        config = config or _try_load(AutoConfig, name)
        ids = ids_as_set(tokenizer.eos_token_id)
        if config is not None:
            ids |= ids_as_set(config.get_text_config().eos_token_id)
        ids |= ids_as_set(getattr(_try_load(GenerationConfig, name), "eos_token_id", None))
        for template in _templates(tokenizer):
            if problem := template_problem(template):
                raise ModelError(f"The chat template of {name!r} cannot be used: {problem}.")
        try:
            return HuggingFaceTokenizer(tokenizer, frozenset(ids), thinking)
        except ModelError as error:
            raise ModelError(f"{name!r} cannot be loaded. {error}") from None
    except StepSpecError:
        raise
    except Exception as error:  # third-party files can fail in any way
        raise ModelError(f"Cannot load the tokenizer of {name!r}: {reason_of(error)}.") from error


_apply: Any = getattr(PreTrainedTokenizerBase, "apply_chat_template")  # noqa: B009 (its type is partly unknown)
OWN_VARIABLES = frozenset(inspect.signature(_apply).parameters) | {
    *("messages", "raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"),
}
"""Variables of chat templates that requests cannot set: transformers sets them, or they are its own arguments."""


def variables_of(template: str) -> frozenset[str]:
    """Return the variables of a chat template that a request may set."""
    extensions: Any = [GenerationTag, loopcontrols]
    parsed, find = jinja2.Environment(extensions=extensions).parse(template), cast("Any", find_undeclared_variables)
    return frozenset(find(parsed) - OWN_VARIABLES)


def _templates(tokenizer: Any) -> Sequence[str]:
    """Return the chat templates of a transformers tokenizer, which may have several by name."""
    found: Any = tokenizer.chat_template
    named = cast("Mapping[str, str]", found).values() if isinstance(found, Mapping) else [found]
    return [template for template in named if template]


@lru_cache(maxsize=16)
def template_problem(template: str, cpu_s: int = TRIAL_CPU_S) -> str | None:
    """Try a chat template in a separate process and return the problem with it, or None.

    Args:
        template: the template's text.
        cpu_s: CPU time in seconds after which the process is killed.
    """
    command = [sys.executable, "-I", str(TRIAL), str(cpu_s)]
    try:
        trial = subprocess.run(
            command, input=template, capture_output=True, text=True, timeout=TRIAL_S, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return "it does not terminate"
    if trial.returncode < 0:  # killed by the CPU time limit
        return "it does not terminate"
    if trial.returncode != 0:
        lines = [line.strip() for line in trial.stderr.splitlines() if line.strip()]
        return f"it cannot be tried: {lines[-1][:MAX_REASON] if lines else 'no reason was given'}"
    return trial.stdout or None


def ids_as_set(ids: Any) -> set[int]:
    """Return the end tokens of a configuration, which has none, one or a list of them, as a set."""
    if ids is None:
        return set()
    end_ids = {ids} if isinstance(ids, int) else set(ids)
    if not all(isinstance(id, int) and id >= 0 for id in end_ids):
        raise ValueError(f"eos_token_id must be a token id or a list of token ids, got {ids!r}")
    return end_ids


def context_of(name: str) -> int | None:
    """Return the context length of a model in tokens; None if its configuration is missing or has no such value."""
    config = _try_load(AutoConfig, name)
    return config and getattr(config.get_text_config(), "max_position_embeddings", None)


def default_sampling(name: str) -> Mapping[str, float]:
    """Return the sampling in a model's `generation_config.json`, by names of `Sampling`.

    Empty without such a file, or if it is greedy or out of range.
    """
    config = _try_load(GenerationConfig, name)
    found: Mapping[str, Any] = {} if config is None else config.to_diff_dict()
    if not found.get("do_sample"):
        return {}
    wanted = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling: dict[str, Any] = {"temperature": 1.0} | {key: found[key] for key in wanted if found.get(key) is not None}
    try:
        Sampling(**sampling)
    except UsageError:
        return {}
    return sampling


def _try_load(kind: Any, name: str) -> Any:
    """Load a model's configuration of a kind; return None if that fails."""
    try:
        return _load(kind, name)
    except Exception:
        return None


def load_config(name: str) -> Any:
    """Load a model's configuration, without the attention kernel that it may name."""
    config = _load(AutoConfig, name)
    config._attn_implementation = None  # a kernel on the Hub is code that comes with the model
    return config


def _load(kind: Any, name: str) -> Any:
    return kind.from_pretrained(name, **loading_options(name))


def weights_hash(name: str) -> str | None:
    """Return the SHA-256 of a model folder's weights and draft vocabulary; None if the folder has no weights."""
    folder = Path(name)
    files = sorted(folder.glob("model*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    files += folder.glob(draft_vocabulary.FILE)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
