"""Judge models on servers: rewards through vLLM's `/pooling`, embeddings through `/v1/embeddings`."""

import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field

from stepspec.engines.hugging_face import HuggingFaceTokenizer, load_tokenizer, weights_hash
from stepspec.engines.judge_model import JudgeAbility, RewardIds, check_reward_tokenizer
from stepspec.engines.protocol import hash_of
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import Count, validated
from stepspec.engines.remote.client import Wire
from stepspec.engines.remote.problems import nonsense, tokenizer_hint
from stepspec.engines.remote.trials import TRIAL_IDS, TRIAL_TEXT, Trials, detected
from stepspec.engines.thinking import NONE
from stepspec.errors import ModelError, UsageError

MAX_LABELS = 64
"""Maximum number of values of a reward. A pooling model that returns more returns hidden states."""

WITHOUT_EFFECT = frozenset({"context", "replay_headers", "thinking"})
"""Options of an address that judge models do not use."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Row = Annotated[list[Finite], Field(min_length=1)]


class _Pooled(BaseModel):
    class PooledItem(BaseModel):
        data: Row | Annotated[list[Row], Field(min_length=1)]

    data: Annotated[list[PooledItem], Field(min_length=1, max_length=1)]

    @property
    def values(self) -> list[float]:
        """Values of the last token. Some models return values of all tokens."""
        match self.data[0].data:
            case [*_, list(last)]:
                return last
            case values:
                return values  # type: ignore[return-value]


class _EmbeddingList(BaseModel):
    class EmbeddingItem(BaseModel):
        index: Count = 0
        embedding: Row

    data: Annotated[list[EmbeddingItem], Field(min_length=1)]


@dataclass(frozen=True)
class JudgeServer:
    """One judge model on a server."""

    model: str
    folder: str
    """Folder or Hub name of the weights and tokenizer, if the server reports it; else the model's name."""
    kind: str
    """The server's name and version, if it reports them."""
    ability: JudgeAbility
    takes_salt: bool
    may_take_salt: bool
    """See `ModelCard`, like the field before."""

    @classmethod
    def found(cls, address: Address) -> "JudgeServer":
        """Detect what the model at an address can do.

        Raises:
            ModelError: there is no such server or model, or it gives neither embeddings nor rewards.
        """
        return detected(address, lambda *given: _JudgeDetector(*given).server())


class _JudgeDetector(Trials):
    async def server(self) -> JudgeServer:
        card = await self.model_card()
        fields = {"model": card.id, "encoding_format": "float"}
        embeddings = f"{self.address.base}/embeddings"
        ability: JudgeAbility
        if await self.try_post(_EmbeddingList, embeddings, fields | {"input": [TRIAL_TEXT]}):
            ability = "embed"
        elif await self._rewards(fields):
            ability = "reward"
        else:
            raise ModelError(
                f"{card.id} at {self.address.base} gives neither embeddings nor rewards. Serve it with vLLM's "
                "--runner pooling."
            )
        return JudgeServer(
            model=card.id,
            folder=card.root or card.id,
            kind=await self.kind(card),
            ability=ability,
            takes_salt=card.server.takes_salt,
            may_take_salt=card.server.may_take_salt,
        )

    async def _rewards(self, fields: dict[str, Any]) -> bool:
        pooled = await self.try_post(_Pooled, f"{self.address.root}/pooling", fields | {"input": TRIAL_IDS})
        return pooled is not None and len(pooled.values) <= MAX_LABELS and 0 <= pooled.values[-1] <= 1


class RemoteJudge:
    """A judge model on a server. See `JudgeModel`.

    Rewards and embeddings are as the server pools them. A reward is the only value of the last token, or the last of
    several, such as the probability of the last label.
    """

    def __init__(
        self, address: Address, server: JudgeServer, tokenizer: HuggingFaceTokenizer | None, title: str | None = None
    ) -> None:
        self.name = title or server.model
        forgets: list[JudgeAbility] = ["forget"] if server.takes_salt else []
        self.abilities: frozenset[JudgeAbility] = frozenset({server.ability, *forgets})
        self._address = address
        self._server = server
        self._ids = None if tokenizer is None else RewardIds(tokenizer)
        self._wire = Wire(address)
        self._cache_salt: str | None = None
        self._name = uuid.uuid4().hex

    @classmethod
    def load(cls, spec: str, title: str | None = None) -> "RemoteJudge":
        """Detect what the model on a server can do, and load its tokenizer if it gives rewards.

        Args:
            spec: the server's address, see `Address`.
            title: the model's name in results; None uses its name on the server.

        Raises:
            UsageError: the address is invalid.
            ModelError: the server does not answer, the model gives neither embeddings nor rewards, or its tokenizer
                cannot be loaded.
        """
        address = Address.parsed(spec)
        server = JudgeServer.found(address)
        unused = WITHOUT_EFFECT | ({"tokenizer"} if server.ability == "embed" else set())
        for name in sorted(unused):
            if getattr(address, name) != getattr(Address, name):
                raise UsageError(f"The option {name} of an address has no effect on this judge model. Remove it.")
        if server.ability == "embed":
            return cls(address, server, None, title)
        with tokenizer_hint():
            tokenizer = load_tokenizer(address.tokenizer or server.folder, thinking=NONE)
            check_reward_tokenizer(tokenizer, server.model)
        return cls(address, server, tokenizer, title)

    async def reward(self, prompt: str, steps: Sequence[str], group: str | None = None) -> float:
        """See `JudgeModel.reward`."""
        assert self._ids is not None
        found = await self._ask(f"{self._address.root}/pooling", self._ids.of(prompt, steps), prompt, group)
        value = validated(_Pooled, self._address, found, "reward").values[-1]
        if not 0 <= value <= 1:
            raise nonsense(self._address, f"a reward of {value:g}, which is not between 0 and 1")
        return value

    async def embed(self, texts: Sequence[str], group: str | None = None) -> list[list[float]]:
        """See `JudgeModel.embed`."""
        found = await self._ask(f"{self._address.base}/embeddings", list(texts), texts[0], group)
        items = validated(_EmbeddingList, self._address, found, "list of embeddings").data
        by_index = {item.index: item.embedding for item in items}
        if len(items) != len(texts) or by_index.keys() != set(range(len(texts))):
            raise nonsense(self._address, f"{len(items)} embeddings of {len(texts)} texts")
        return [self._normalized(by_index[index]) for index in range(len(texts))]

    def _normalized(self, embedding: Sequence[float]) -> list[float]:
        length = math.hypot(*embedding)
        if not length:
            raise nonsense(self._address, "an embedding of zeros")
        return [value / length for value in embedding]

    async def _ask(self, url: str, input: object, text: str, group: str | None) -> Any:
        """Send a request. Requests of a group about the same text have the same session, for routers."""
        fields = {"model": self._server.model, "input": input, "encoding_format": "float"}
        if self._server.may_take_salt and (salt := hash_of(group, self._cache_salt)) is not None:
            fields["cache_salt"] = salt
        session = hash_of(self._name, group, text)
        assert session is not None
        headers = {**self._address.routing.headers, self._address.routing.header: session[:32]}
        found, _ = await self._wire.ask(url, json.dumps(fields).encode(), headers)
        return found

    def describe(self) -> dict[str, str | None]:
        """See `JudgeModel.describe`."""
        where = f"{self._server.kind} at {self._address.base}"
        return {"name": self.name, "weights": weights_hash(self._server.folder), "dtype": None, "device": where}

    async def forget(self) -> None:
        """See `JudgeModel.forget`. Later calls have a new cache salt, if the server supports one."""
        if self._server.may_take_salt:
            self._cache_salt = uuid.uuid4().hex

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._wire.aclose()
