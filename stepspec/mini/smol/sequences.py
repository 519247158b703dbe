"""Training sequences of the pair `smol`: conversations in tokens, packed into rows with the masks of their trees."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepspec.engines.protocol import THINK_END
from stepspec.mini.smol.texts import Conversation, Proposed, draw, load_gsm8k

ROW = 512
"""Tokens of a row; longer conversations get a row of their own length."""
LONG_ROW = 4096
ROW_POOL = 64
"""Rows that are packed together."""


@dataclass
class Tree:
    """A conversation in tokens: a trunk, then branches that leave it.

    Attributes:
        ids: all tokens, the trunk's first.
        learned: whether the model is taught to write the token.
        positions: of the tokens.
        segments: 0 is the trunk.
        cuts: how many tokens of the trunk a token of a branch sees.
    """

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, learned: bool) -> None:
        """Appends to the trunk."""
        start = len(self.ids)
        self._extend(ids, [learned] * len(ids), start, 0, 0)

    def branch(self, cut: int, ids: Sequence[int], num_learned: int) -> None:
        """Appends a branch after `cut` tokens of the trunk, of which the last `num_learned` are learned."""
        learned = [False] * (len(ids) - num_learned) + [True] * num_learned
        self._extend(ids, learned, cut, self.segments[-1] + 1, cut)

    def trunk(self) -> "Tree":
        """The conversation without its branches."""
        end = sum(segment == 0 for segment in self.segments)
        return Tree(self.ids[:end], self.learned[:end], self.positions[:end], self.segments[:end], self.cuts[:end])

    def _extend(self, ids: Sequence[int], learned: list[bool], position: int, segment: int, cut: int) -> None:
        self.ids += ids
        self.learned += learned
        self.positions += range(position, position + len(ids))
        self.segments += [segment] * len(ids)
        self.cuts += [cut] * len(ids)


class TreeMaker:
    """Turns conversations into tokens.

    Args:
        tokenizer: the pair's.
        proposals: steps of a model that are judged in some conversations.
    """

    def __init__(self, tokenizer: Any, proposals: Sequence[Proposed] = ()) -> None:
        self.tokenizer = tokenizer
        self.proposals = proposals
        self.gsm8k = load_gsm8k("train")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def draw(self, rng: random.Random) -> Tree:
        """A conversation at random."""
        return self.tree(draw(rng, self.gsm8k, self.proposals))

    def tree(self, conversation: Conversation) -> Tree:
        """The conversation's tokens. Steps end with a blank line; the answer ends the turn."""
        tree = Tree()
        opening = self.tokenizer.apply_chat_template(
            conversation.messages, tools=list(conversation.tools) or None, add_generation_prompt=True, tokenize=False
        )
        tree.add(self.encode(opening), learned=False)
        ends = [len(tree.ids)]
        for piece in conversation.thinking:
            tree.add(self.encode(f"{piece.text}\n\n"), learned=piece.learned)
            ends.append(len(tree.ids))
        tree.add(self.encode(f"{THINK_END}\n\n{conversation.answer}<|im_end|>"), learned=True)
        for each in conversation.judgements:
            step = f"{each.step}\n\n" if each.step else ""
            asked = f"{step}<|im_end|>\n<|im_start|>user\n{each.prompt.user}<|im_end|>\n<|im_start|>assistant\n"
            answer = self.encode(each.answer)
            tree.branch(ends[each.after], self.encode(asked + each.prompt.prefill) + answer, len(answer))
        return tree


def rows(maker: TreeMaker, seed: str, first_pool: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Pools of packed rows; each pool depends on the seed and its number alone."""
    for number in itertools.count(first_pool):
        yield pool_of_rows(maker, f"{seed}/{number}")


def pool_of_rows(maker: TreeMaker, seed: str) -> list[dict[str, torch.Tensor]]:
    """Rows of one pool in random order; the last, unfilled ones are dropped."""
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
    """One row: ids and positions [1, T], targets [T] with -100 where nothing is learned, the mask [1, 1, T, T]."""
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
    # What is learned at a token is the next one of its own segment.
    follows = torch.zeros(len(ids), dtype=torch.bool)
    follows[:-1] = learned[1:] & (segments[1:] == segments[:-1]) & (document[1:] == document[:-1])
    targets = torch.where(follows, ids.roll(-1), -100)
    return {
        "ids": ids[None],
        "positions": torch.tensor([each for tree in trees for each in tree.positions])[None],
        "targets": targets,
        "mask": torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[None, None],
    }
