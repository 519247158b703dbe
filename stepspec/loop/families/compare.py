"""The draft proposes steps ahead, and the target writes its own at each place at the same time."""

from stepspec.loop.lookahead import Comparison, Lookahead, Place
from stepspec.loop.request import Request


async def compare(request: Request) -> None:
    """Lookahead Reasoning (arXiv:2506.19830, section 3): the longest run of draft steps that mean the same as the
    target's own is accepted, and the target's own step follows it.

    Everything is written as soon as what it continues exists: the draft's next steps, and the target's step at each
    place.

    Departures: the target judges equivalence, with the problem in view; only the target ends the thinking, and a draft
    step that ends it is accepted only if the target's own does too; a step that reached its longest length is never
    accepted; the target continues alone once too much was wasted, or if the draft is slower.
    """
    table = request.policy.compare
    while await request.speculates():
        async with Lookahead(request, table.width) as ahead:
            path = list[Comparison]()
            branches = ahead.look(Place(), table.depth)
            while branches is not None:
                own = await ahead.wait("target", branches.own)
                if own is None:
                    break
                path.append(Comparison(own))
                for draft, following in branches.drafts:
                    step = await ahead.wait_for_draft(branches, draft)
                    if step is not None and await ahead.same(branches.place, step, path[-1]):
                        ahead.drop(other for other in branches.tasks if other is not following)
                        branches = await ahead.wait("draft", following)
                        break
                else:
                    break
            if not ahead.commit(path):
                return
