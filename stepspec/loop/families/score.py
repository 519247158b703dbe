"""The draft proposes steps, and judges decide about each of them."""

from stepspec.loop.request import Request


async def score(request: Request) -> None:
    """SpecReason (arXiv:2504.07891, section 3): the target judges every step of the draft and writes the rejected ones.

    Departures: several judges may decide, the target may keep the part of a rejected step that it agrees with, only the
    target ends the thinking, and it writes the answer.
    """
    while await request.speculates():
        proposal = await request.propose()
        if proposal is None:
            return
        judged = await request.judge(proposal)
        if judged is None:
            return
        if judged.accepted:
            request.accept(proposal, judged)
        else:
            await request.replace(proposal, judged)
