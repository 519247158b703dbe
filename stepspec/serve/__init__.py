"""The service: a pair of models behind OpenAI's chat completions API. Each answer includes speculation metrics."""

from stepspec.base.extras import from_extra

with from_extra("serve", "The service"):
    from stepspec.serve.app import create_app

__all__ = ["create_app"]
