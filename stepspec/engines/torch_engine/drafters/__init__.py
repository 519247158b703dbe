"""Drafters by the names that policies and calls use."""

from stepspec.engines.protocol import CALL_DRAFTERS, DrafterName, Tokenizer
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter
from stepspec.engines.torch_engine.drafters.draft_model import DraftModel, EarlyExit
from stepspec.engines.torch_engine.drafters.lookup import PromptLookup
from stepspec.engines.torch_engine.drafters.medusa import FILE, Medusa, MedusaHeads
from stepspec.engines.torch_engine.drafters.retokenized import Retokenized
from stepspec.engines.torch_engine.drafters.suffix import Suffix
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.errors import UsageError

__all__ = ["Draft", "Drafter", "Drafters"]

EARLY_SHARE = 4
"""Early exit drafts with the first 1 / EARLY_SHARE of the target's layers, at least one."""


class Drafters:
    """The drafters of one target. Each is created on first use."""

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        heads: MedusaHeads | None,
        max_slots: int,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    ) -> None:
        """`tokenizers` are those of the draft and of the target, if their vocabularies differ."""
        self._target = target
        self._tokenizers = tokenizers
        self._draft = draft
        self._heads = heads
        self._max_slots = max_slots
        self._made: dict[DrafterName, Drafter] = {}

    def check(self, name: DrafterName) -> None:
        """Check that the engine can use a drafter.

        Raises:
            UsageError: the drafter needs a draft model, Medusa heads or layers that are missing.
        """
        if (missing := self._missing(name)) is not None:
            raise UsageError(missing)

    def available(self) -> list[DrafterName]:
        """Return the names of the drafters that pass `check`."""
        return [name for name in CALL_DRAFTERS if self._missing(name) is None]

    def _missing(self, name: DrafterName) -> str | None:
        """Return an error message if the drafter cannot be used; None if it can."""
        if name == "draft-model" and self._draft is None:
            return "The draft-model drafter needs a draft model. Pass one with --draft."
        if name == "medusa" and self._heads is None:
            return f"{self._target.name} has no Medusa heads: {FILE} is missing from its folder."
        if name == "early-exit" and self._target.num_layers < 2:
            return f"{self._target.name} has one layer; the early-exit drafter needs at least two."
        return None

    def get(self, name: DrafterName) -> Drafter | None:
        """Return the drafter of that name; None for `none`."""
        if name != "none" and name not in self._made:
            self._made[name] = self._make(name)
        return self._made.get(name)

    def _make(self, name: DrafterName) -> Drafter:
        target = self._target
        if name == "draft-model":
            assert self._draft is not None
            if self._tokenizers is not None:
                return Retokenized(self._draft, *self._tokenizers, self._max_slots + target.uses_graphs)
            return DraftModel(self._draft, target.vocab_size, self._max_slots + target.uses_graphs)
        if name == "early-exit":
            return EarlyExit(target, max(1, target.num_layers // EARLY_SHARE))
        if name == "medusa":
            assert self._heads is not None
            return Medusa(self._heads)
        return PromptLookup(target.device) if name == "prompt-lookup" else Suffix(target.device)

    def release(self, row: BatchRow) -> None:
        """Release what the row's drafter holds for it, after the row has ended."""
        drafter = self._made.get(row.drafting.drafter)
        if drafter is not None:
            drafter.release(row)

    def forget(self) -> None:
        """Drop what the drafters keep of rows that have ended."""
        for drafter in self._made.values():
            drafter.forget()
