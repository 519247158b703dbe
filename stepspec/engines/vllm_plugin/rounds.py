# pyright: basic, reportMissingImports=false
"""A round of vLLM with relaxed requests. The exact rule is vLLM's own, with its random numbers; see `relaxation`."""

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stepspec.engines.protocol import Acceptance
from stepspec.engines.torch_engine.relaxation import relaxation_of, relaxed, token_kinds

logger = logging.getLogger("vllm.plugins.stepspec")
_ROUNDS: list["RelaxedRound"] = []
_KINDS: WeakKeyDictionary[Any, Tensor | None] = WeakKeyDictionary()


def current_round() -> "RelaxedRound | None":
    """Return the round that is being sampled, if it has relaxed requests."""
    return _ROUNDS[-1] if _ROUNDS else None


def kinds_of(runner: Any, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the kinds of a model's tokens, see `token_kinds`; None, and all rules are exact, without its tokenizer."""
    if runner not in _KINDS:
        from stepspec.engines.hugging_face import load_tokenizer

        try:
            _KINDS[runner] = token_kinds(load_tokenizer(runner.model_config.tokenizer), vocab_size, device)
        except Exception:  # a request must not end the server
            logger.exception("stepspec cannot load the model's tokenizer, so no token is relaxed.")
            _KINDS[runner] = None
    return _KINDS[runner]


class RelaxedRound:
    """A round, while vLLM samples it."""

    def __init__(self, rules: Sequence[Acceptance], kinds: Tensor) -> None:
        self._how = relaxation_of(rules, kinds)
        self.edited: Tensor | None = None
        """The logits of drafted positions after penalties, bias and masks, [N, V]."""
        self._relaxed: Tensor | None = None

    def __enter__(self) -> "RelaxedRound":
        _ROUNDS.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _ROUNDS.pop()

    def relaxed_places(self) -> list[list[int]]:
        """Return the places of the relaxed tokens that stand, for each request. It waits for the device."""
        assert self._relaxed is not None
        return [[place for place, is_relaxed in enumerate(row) if is_relaxed] for row in self._relaxed.tolist()]

    def decide(
        self,
        vllm: Any,
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        use_fp64_gumbel: bool = False,
        **_: Any,
    ) -> Tensor:
        """Return the tokens of a round as vLLM's `rejection_sample` does, int32 [B, K + 1], with -1 behind them.

        Args:
            vllm: the module `vllm.v1.sample.rejection_sampler`.
            draft_token_ids: drafted tokens of all requests, [N]; -1 for padding.
            num_draft_tokens: how many each request has.
            max_spec_len: K, the most of them.
            cu_num_draft_tokens: their running total, [B].
            draft_probs: the distributions that they were sampled from, [N, V]; None if they were not sampled.
            target_logits: after temperature, top-k and top-p, [N, V]; of greedy requests as they are.
            bonus_token_ids: the tokens that follow if all are accepted, [B, 1].
            sampling_metadata: vLLM's.
            use_fp64_gumbel: vLLM's.
        """
        device, drafted = target_logits.device, draft_token_ids.long()
        counts = cu_num_draft_tokens.long().diff(prepend=cu_num_draft_tokens.new_zeros(1).long())  # [B]
        known, column = drafted >= 0, drafted.clamp(min=0)[:, None]
        replacing = target_logits.argmax(-1)
        accepted, possible = (replacing == drafted) & known, known
        if not sampling_metadata.all_greedy:
            noise = vllm.generate_uniform_probs(len(drafted), num_draft_tokens, sampling_metadata.generators, device)
            probs = target_logits.softmax(-1, dtype=torch.float32)
            recovered = vllm.sample_recovered_tokens(
                max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, probs,
                sampling_metadata, device, use_fp64_gumbel,
            )  # fmt: skip
            p = probs.gather(1, column)[:, 0]
            q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, column)[:, 0]
            greedy = (sampling_metadata.temperature == 0).repeat_interleave(counts, output_size=len(drafted))
            accepted = torch.where(greedy, accepted, (q > 0) & (p / q >= noise) & known)
            possible = known & (greedy | (p > 0))
            replacing = torch.where(greedy, replacing, recovered.long())
        places = torch.arange(max_spec_len, device=device)
        inside = places < counts[:, None]  # [B, K]
        table = ((cu_num_draft_tokens - counts)[:, None] + places).clamp(max=len(drafted) - 1).long()
        accepted = accepted[table] & inside
        assert self._how is not None
        assert self.edited is not None
        kept = relaxed(self._how, self.edited[table], column[:, 0][table], accepted) & possible[table] & inside
        num_kept = (accepted | kept).long().cumprod(1).sum(1, keepdim=True)  # [B, 1]
        self._relaxed = kept & (places < num_kept)
        following = replacing[table].gather(1, num_kept.clamp(max=max_spec_len - 1))
        following = torch.where(num_kept == counts[:, None], bonus_token_ids.long(), following)
        tokens = torch.nn.functional.pad(drafted[table], (0, 1)).scatter(1, num_kept, following)
        beyond = torch.arange(max_spec_len + 1, device=device) > num_kept
        return tokens.masked_fill(beyond, vllm.PLACEHOLDER_TOKEN_ID).int()
