"""A model behind any OpenAI-compatible server: vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp."""

from stepspec.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
