"""The draft proposes steps ahead, and the target writes its own at each place at the same time."""

import asyncio

from stepspec.loop.lookahead import Lookahead, Piece, Place, Standing
from stepspec.loop.request import Request


async def compare(request: Request) -> None:
    """Lookahead Reasoning (arXiv:2506.19830, section 3): the longest run of draft steps that mean the same as the
    target's own stands, and the target's own step follows it.

    Everything runs as soon as what it continues exists: the draft's next steps, and the target's step at each place.

    Departures: the target judges equivalence, with the problem in view; only the target ends the thinking, and a draft
    step that ends it stands only if the target's own does too; a step that reached its longest length never stands; the
    target continues alone once too much was wasted.
    """
    table = request.policy.compare

    async def explore(ahead: Lookahead, place: Place, depth: int) -> list[Standing]:
        """Return the steps that stand after a place."""
        own = ahead.start(ahead.write, place)
        drafts = [ahead.start(ahead.draft, place, sibling) for sibling in range(table.width if depth else 0)]
        rests = [ahead.start(follow, ahead, place, draft, depth - 1) for draft in drafts]
        step = await ahead.wait("target", own)
        if step is None:
            return []
        standing = Standing(step)
        for draft, rest in zip(drafts, rests, strict=True):
            proposal = await ahead.wait("draft", draft)
            if proposal is not None and await ahead.same(place, proposal, standing):
                ahead.drop(each for each in rests if each is not rest)
                return [standing, *await ahead.wait("target", rest)]
        return [standing]

    async def follow(ahead: Lookahead, place: Place, draft: asyncio.Task[Piece | None], depth: int) -> list[Standing]:
        piece = await draft
        return [] if piece is None or piece.step.tag is not None else await explore(ahead, place.after(piece), depth)

    while await request.speculates():
        async with Lookahead(request) as ahead:
            if not ahead.commit(await explore(ahead, Place(), table.depth)):
                return
