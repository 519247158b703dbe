"""Engine for models on OpenAI-compatible servers: vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp."""

from stepspec.base.extras import from_extra

with from_extra("remote", "A model on a server"):
    from stepspec.engines.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
