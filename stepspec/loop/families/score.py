"""The draft proposes steps, and judges decide about each of them."""

from stepspec.loop.request import Request


async def score(request: Request) -> None:
    """SpecReason (arXiv:2504.07891, section 3): the target judges every step of the draft and writes the rejected ones.

    Departures: several judges may decide, the draft may propose several steps side by side, the target may keep the
    part of a rejected step that it agrees with, only the target ends the thinking, and it writes the answer.
    """
    while await request.speculates():
        proposals = await request.propose(request.policy.score.candidates)
        best = await request.judge(proposals)
        if best is None:
            return
        if best.accepted:
            request.accept(best)
        else:
            await request.replace(best)
