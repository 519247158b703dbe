# pyright: reportMissingImports=false
"""The vLLM plugin: drafted tokens of vLLM's own speculation may stand under the rules of `Acceptance`; see `fields`.

vLLM loads it by the entry point `vllm.general_plugins`. It changes nothing for a request that does not ask for it, but
for repairs of vLLM's CPU build. It wraps private functions of vLLM, so it works with the versions in `VERSIONS` alone,
and with runner V1. This module imports neither torch nor vLLM: `hooks` patches a module of vLLM when a process imports
it.
"""

import logging

from stepspec.engines.vllm_plugin.hooks import install

VERSIONS = ("0.32.0",)
"""The versions of vLLM that the plugin is tested with."""

logger = logging.getLogger("vllm.plugins.stepspec")


def register() -> None:
    """Add the rules to vLLM, in each of its processes; the entry point."""
    import vllm

    version = vllm.__version__.partition("+")[0]
    if version in VERSIONS:
        install()
    else:
        logger.warning(
            "stepspec's plugin does nothing with vLLM %s: it is for %s. Relaxed rules of acceptance are not available.",
            version,
            ", ".join(VERSIONS),
        )
