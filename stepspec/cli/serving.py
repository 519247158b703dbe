"""`stepspec serve`: the models behind OpenAI's chat completions."""

from typing import Annotated

import typer

from stepspec.cli.options import DraftOption, PolicyOption, TargetOption
from stepspec.errors import StepSpecError


def serve_models(
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: PolicyOption = "stepspec",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets everybody in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
) -> None:
    """Serve chat completions over HTTP, until stopped."""
    try:
        import uvicorn

        from stepspec.serve import create_app
    except ModuleNotFoundError as error:
        raise StepSpecError(
            f"The service needs {error.name}, which is not installed: pip install 'stepspec[serve]'."
        ) from error
    from stepspec.policy import load_policy
    from stepspec.session import load_pair

    needs_draft = load_policy(policy)[0].needs_draft
    app = create_app(load_pair(target, draft, needs_draft=needs_draft), policy)
    uvicorn.run(app, host=host, port=port, access_log=False)
