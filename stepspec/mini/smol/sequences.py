"""Training sequences of the pair `smol`: tokenized conversations, packed into rows with tree masks."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepspec.mini.smol.base import THINK_END
from stepspec.mini.smol.texts import SHARES, Conversation, Proposed, draw, load_gsm8k

ROW = 512
"""Number of tokens of a row. A longer conversation gets a separate row."""
LONG_ROW = 4096
ROW_POOL = 64
"""Number of rows that are packed from one pool."""


@dataclass
class Tree:
    """A tokenized conversation: a trunk, then its branches.

    Attributes:
        ids: ids of all tokens, the trunk first.
        learned: whether the model learns to write each token.
        positions: position of each token.
        segments: segment of each token; 0 is the trunk.
        cuts: number of trunk tokens that each branch token sees.
    """

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, learned: bool) -> None:
        """Append tokens to the trunk."""
        start = len(self.ids)
        self._extend(ids, [learned] * len(ids), start, 0, 0)

    def branch(self, cut: int, ids: Sequence[int], num_learned: int) -> None:
        """Append a branch after `cut` tokens of the trunk. Its last `num_learned` tokens are learned."""
        learned = [False] * (len(ids) - num_learned) + [True] * num_learned
        self._extend(ids, learned, cut, self.segments[-1] + 1, cut)

    def trunk(self) -> "Tree":
        """Return the conversation without its branches."""
        end = sum(segment == 0 for segment in self.segments)
        return Tree(self.ids[:end], self.learned[:end], self.positions[:end], self.segments[:end], self.cuts[:end])

    def _extend(self, ids: Sequence[int], learned: list[bool], position: int, segment: int, cut: int) -> None:
        self.ids += ids
        self.learned += learned
        self.positions += range(position, position + len(ids))
        self.segments += [segment] * len(ids)
        self.cuts += [cut] * len(ids)


class TreeMaker:
    """A converter of conversations to token trees.

    Args:
        tokenizer: the tokenizer of the pair.
        proposals: steps of a model, which some conversations judge.
        shares: the share of each kind of conversation, see `texts.SHARES`.
    """

    def __init__(
        self, tokenizer: Any, proposals: Sequence[Proposed] = (), shares: Mapping[str, float] = SHARES
    ) -> None:
        self.tokenizer = tokenizer
        self.proposals = proposals
        self.shares = shares
        self.gsm8k = load_gsm8k("train")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def draw(self, rng: random.Random) -> Tree:
        """Return a randomly sampled conversation."""
        return self.tree(draw(rng, self.gsm8k, self.proposals, self.shares))

    def tree(self, conversation: Conversation) -> Tree:
        """Return the tokens of a conversation. Each step ends with a blank line, and the answer ends the turn."""
        tree = Tree()
        opening = self.tokenizer.apply_chat_template(
            conversation.messages, tools=list(conversation.tools) or None, add_generation_prompt=True, tokenize=False
        )
        tree.add(self.encode(opening), learned=False)
        ends = [len(tree.ids)]
        for part in conversation.thinking:
            tree.add(self.encode(f"{part.text}{part.end}"), learned=part.learned)
            ends.append(len(tree.ids))
        tree.add(self.encode(f"{THINK_END}\n\n{conversation.answer}<|im_end|>"), learned=True)
        for each in conversation.judgements:
            step = f"{each.step}\n\n" if each.step else ""
            asked = f"{step}<|im_end|>\n<|im_start|>user\n{each.prompt.user}<|im_end|>\n<|im_start|>assistant\n"
            answer = self.encode(each.answer)
            tree.branch(ends[each.after], self.encode(asked + each.prompt.prefill) + answer, len(answer))
        return tree


def rows(maker: TreeMaker, seed: str, first_pool: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield pools of packed rows. Each pool depends only on the seed and its number."""
    for number in itertools.count(first_pool):
        yield pool_of_rows(maker, f"{seed}/{number}")


def pool_of_rows(maker: TreeMaker, seed: str) -> list[dict[str, torch.Tensor]]:
    """Return the rows of one pool in random order. Trees longer than `LONG_ROW` are skipped."""
    rng = random.Random(seed)
    trees: list[Tree] = []
    while sum(len(tree.ids) for tree in trees) < ROW * ROW_POOL:
        tree = maker.draw(rng)
        if len(tree.ids) <= LONG_ROW:
            trees.append(tree)
    bins: list[list[Tree]] = []
    for tree in sorted(trees, key=lambda tree: -len(tree.ids)):  # first fit, the longest first
        fitting = (each for each in bins if sum(len(other.ids) for other in each) + len(tree.ids) <= ROW)
        (next(fitting, None) or _new(bins)).append(tree)
    rng.shuffle(bins)
    return [collate(each) for each in bins]


def _new(bins: list[list[Tree]]) -> list[Tree]:
    bins.append([])
    return bins[-1]


def collate(trees: Sequence[Tree]) -> dict[str, torch.Tensor]:
    """Pack trees into one row: ids and positions [1, T], targets [T] (-100: not learned), and the mask [1, 1, T, T]."""
    ids = torch.tensor([id for tree in trees for id in tree.ids])
    learned = torch.tensor([each for tree in trees for each in tree.learned])
    document = torch.tensor([number for number, tree in enumerate(trees) for _ in tree.ids])
    segments = torch.tensor([each for tree in trees for each in tree.segments])
    cuts = torch.tensor([each for tree in trees for each in tree.cuts])
    place = torch.cat([torch.arange(len(tree.ids)) for tree in trees])
    index = torch.arange(len(ids))
    own = (segments[:, None] == segments[None, :]) & (index[:, None] >= index[None, :])
    trunk = (segments == 0)[None, :] & (place[None, :] < cuts[:, None])
    visible = (own | trunk) & (document[:, None] == document[None, :])
    # The target of a token is the next token of its segment.
    follows = torch.zeros(len(ids), dtype=torch.bool)
    follows[:-1] = learned[1:] & (segments[1:] == segments[:-1]) & (document[1:] == document[:-1])
    targets = torch.where(follows, ids.roll(-1), -100)
    return {
        "ids": ids[None],
        "positions": torch.tensor([each for tree in trees for each in tree.positions])[None],
        "targets": targets,
        "mask": torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[None, None],
    }
