"""LangChain: a chat model and a Runnable that speculate on reasoning.

from stepspec.langchain import ChatStepSpec

model = ChatStepSpec(model="vllm:Qwen/Qwen3-32B", draft="vllm:Qwen/Qwen3-0.6B")
"""

from stepspec.base.extras import from_extra

with from_extra("langchain", "stepspec.langchain"):
    from stepspec.langchain.chat import ChatStepSpec
    from stepspec.langchain.runnable import StepSpecRunnable

__all__ = ["ChatStepSpec", "StepSpecRunnable"]
