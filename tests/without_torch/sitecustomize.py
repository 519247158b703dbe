"""Python imports this file at its start when its folder is on the path, see `commands.without_torch`."""

import sys
from importlib.machinery import PathFinder
from typing import Any

HIDDEN = ("torch", "sklearn")


class WithoutTorch(PathFinder):
    """Finds every package but PyTorch and scikit-learn, which transformers loads only because they are installed."""

    @classmethod
    def find_spec(cls, fullname: str, *arguments: Any, **named: Any) -> Any:
        """See `PathFinder.find_spec`."""
        return None if fullname in HIDDEN else super().find_spec(fullname, *arguments, **named)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
