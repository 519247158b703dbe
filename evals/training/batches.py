"""Training batches: sampled sequences, grouped by length and padded, with tree masks and attention targets."""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from evals.training.gsm_mini import NAMES
from evals.training.recipes import Stage
from evals.training.sequences import NOT_LEARNED, SequenceMaker, TreeSequence

CONTEXT_OF_A_COPY = 5  # tokens from a name on that must match before the copied token and its source
PART = 12  # sequences per pass on a CPU, few enough to fit its cache
POOL = 8  # batches that are sampled together and grouped by length, to reduce padding


def collate(sequences: Sequence[TreeSequence], names: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Pad sequences to one length and build the mask of their trees, [B, 1, T, T].

    Args:
        sequences: the sequences of the batch.
        names: token ids of names. If given, the batch also has attention targets: those of `places_to_look`, from each
            token of a judged step to the token before it (`before`), and from a judge's answer to the end of the step
            (`ends`).
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
    judged = (batch["flaws"] >= 0) | (batch["differences"] >= 0)  # [B, T], including steps of the trunk
    # Steps of the trunk are always right, so do not train on them.
    batch["flaws"] = torch.where(segments > 0, batch["flaws"], NOT_LEARNED)
    batch["onsets"] = torch.stack([_onsets(batch["flaws"]), _onsets(batch["differences"])]).amax(0)
    if names is not None:
        batch |= places_to_look(batch["ids"], batch["targets"], visible, names)
        before = torch.where(visible & (index[:, None] > index), index, -1).amax(-1)
        batch["before"] = (index == before[:, :, None]) & judged[:, :, None]
        last = torch.where(visible & judged[:, None], index, -1).amax(-1)
        batch["ends"] = (index == last[:, :, None]) & (batch["verdicts"] >= 0)[:, :, None]
    return batch


def _onsets(labels: torch.Tensor) -> torch.Tensor:
    """Return labels of the first wrong token: 1 at the first label 1, 0 where labels are 0, else `NOT_LEARNED`."""
    first = (labels == 1) & (torch.nn.functional.pad(labels, (1, 0))[:, :-1] == 0)
    return torch.where((labels == 0) | first, labels, NOT_LEARNED)


def places_to_look(
    ids: torch.Tensor, targets: torch.Tensor, visible: torch.Tensor, names: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return attention targets for looking up a person's number in two steps, [B, T, T] each.

    `owners` points from each token shortly after a name to that name. `sources` points from a token after a name to the
    tokens that the next token can be copied from. These equal the next token and follow the same name and tokens.

    Args:
        ids: token ids, [B, T].
        targets: the next tokens, [B, T].
        visible: which tokens each token sees, [B, T, T].
        names: token ids of names.
    """
    length = ids.shape[1]
    pad = torch.nn.functional.pad
    same = pad(ids[:, :, None] == ids[:, None, :], (1, 0))[
        :, :, :length
    ]  # whether a token equals the token before another
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
    """Training batches from step `first_step` on, split into parts. A batch depends only on the seed and its number."""

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
