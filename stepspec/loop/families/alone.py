"""A single model writes the whole text."""

from stepspec.loop.request import Request


async def alone(request: Request) -> None:
    """Let the target or the draft write everything, the baseline of all other families."""
    await request.write_rest()
