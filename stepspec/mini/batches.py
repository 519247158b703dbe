"""Training batches: sequences drawn, cut by length and padded, with the masks of their trees and where to look."""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from stepspec.evaluation.generators.gsm_mini import NAMES
from stepspec.mini.recipes import Stage
from stepspec.mini.sequences import NOT_LEARNED, SequenceMaker, TreeSequence

CONTEXT_OF_A_COPY = 5  # tokens from a name on that must stand before what is copied as before the original
PART = 12  # sequences that a CPU reads at a time: what they touch stays longer in its cache
POOL = 8  # batches that are drawn together and cut by length, so that little is padding


def collate(sequences: Sequence[TreeSequence], names: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Pads to one length and builds the mask of the trees [B, 1, T, T].

    With the ids of names, attention heads can be taught where to look: to `places_to_look` come, from each token of a
    step that is judged, the token before it (`before`), and from a judge's answer the end of the step (`ends`).
    """
    length = max(len(sequence.ids) for sequence in sequences)

    def stack(name: str, fill: int) -> torch.Tensor:
        rows = [getattr(sequence, name) for sequence in sequences]
        return torch.tensor([row + [fill] * (length - len(row)) for row in rows])

    batch = {name: stack(name, 0) for name in ("ids", "positions", "cuts", "free")}
    batch |= {name: stack(name, NOT_LEARNED) for name in ("targets", "verdicts", "flaws", "differences")}
    segments = stack("segments", -1)  # [B, T]
    index = torch.arange(length)
    own = (segments[:, :, None] == segments[:, None, :]) & (index[:, None] >= index[None, :])
    trunk = (segments == 0)[:, None, :] & (index[None, None, :] < batch.pop("cuts")[:, :, None])
    visible = own | trunk
    batch["mask"] = torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[:, None]
    judged = (batch["flaws"] >= 0) | (batch["differences"] >= 0)  # [B, T], steps of the trunk among them
    batch["flaws"] = torch.where(segments > 0, batch["flaws"], NOT_LEARNED)  # which are right, and no news
    batch["onsets"] = torch.stack([_onsets(batch["flaws"]), _onsets(batch["differences"])]).amax(0)
    if names is not None:
        batch |= places_to_look(batch["ids"], batch["targets"], visible, names)
        before = torch.where(visible & (index[:, None] > index), index, -1).amax(-1)
        batch["before"] = (index == before[:, :, None]) & judged[:, :, None]
        last = torch.where(visible & judged[:, None], index, -1).amax(-1)
        batch["ends"] = (index == last[:, :, None]) & (batch["verdicts"] >= 0)[:, :, None]
    return batch


def _onsets(labels: torch.Tensor) -> torch.Tensor:
    """Of labels that are 0 and, from some token on, 1: that token 1, those before it 0, the others not learned."""
    first = (labels == 1) & (torch.nn.functional.pad(labels, (1, 0))[:, :-1] == 0)
    return torch.where((labels == 0) | first, labels, NOT_LEARNED)


def places_to_look(
    ids: torch.Tensor, targets: torch.Tensor, visible: torch.Tensor, names: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Where a number of somebody is found, in two steps, [B, T, T] each: what an attention head is taught.

    `owners` is, of the tokens that come shortly after a name, the name. `sources` are, of what is said after a name,
    the tokens that it can be copied from: the next token itself, seen after the same name and the same tokens since.

    Args:
        ids: [B, T].
        targets: the tokens to be written next, [B, T].
        visible: [B, T, T].
        names: ids of names.
    """
    length = ids.shape[1]
    pad = torch.nn.functional.pad
    same = pad(ids[:, :, None] == ids[:, None, :], (1, 0))[:, :, :length]  # a token, and that before another
    is_name = torch.isin(ids, names)
    matched, nameless = same, ~is_name
    owners, sources = torch.zeros_like(same), torch.zeros_like(same)
    for back in range(1, CONTEXT_OF_A_COPY):
        matched = matched & pad(same, (back, 0, back, 0))[:, :length, :length]
        here = pad(is_name, (back, 0))[:, :length] & nameless
        sources |= matched & here[:, :, None]
        owners |= torch.diag_embed(here[:, back:], -back)
        nameless = nameless & ~here
    return {"owners": owners & visible, "sources": sources & visible & (targets[:, :, None] == ids[:, None, :])}


class Batches(torch.utils.data.IterableDataset[list[dict[str, torch.Tensor]]]):
    """Training batches from step `first_step` on, in parts; each depends on the seed and its number alone."""

    def __init__(self, maker: SequenceMaker, stage: Stage, seed: str, first_step: int, together: int) -> None:
        self.maker = maker
        self.stage = stage
        self.seed = seed
        self.first_step = first_step
        self.together = together

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        stage, batch = self.stage, self.stage.batch
        names = torch.tensor([self.maker.encode(f" {name}")[0] for name in NAMES]) if stage.guided else None
        for pool in itertools.count(self.first_step // POOL):
            rng = random.Random(f"{self.seed}/{pool}")
            sequences = [
                self.maker.draw(
                    rng,
                    stage.max_level,
                    mixed=rng.random() < stage.mixed,
                    judged=rng.random() < stage.judged,
                    drills=stage.drills,
                    candidates=4 if rng.random() < stage.hard else 1,
                )
                for _ in range(POOL * batch)
            ]
            sequences.sort(key=lambda sequence: len(sequence.ids))
            cuts = [sequences[index : index + batch] for index in range(0, len(sequences), batch)]
            rng.shuffle(cuts)
            for step, cut in enumerate(cuts, start=pool * POOL):
                if step >= self.first_step:
                    yield [collate(cut[i : i + self.together], names) for i in range(0, batch, self.together)]
