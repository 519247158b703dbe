"""The service: pairs of models behind OpenAI's API. Each answer includes speculation metrics."""

from stepspec.base.extras import from_extra

with from_extra("serve", "The service"):
    from stepspec.serve.admission import ServiceLimits
    from stepspec.serve.app import create_app
    from stepspec.serve.keys import Keys
    from stepspec.serve.settings import Settings

__all__ = ["Keys", "ServiceLimits", "Settings", "create_app"]
