"""Call a tool through LangChain: the model writes the call, the program runs it, and the model answers with the result.

The embedded pair has not learned to use tools. `tool_choice` forces a call here, and its arguments follow the tool's
schema, but the answer makes no sense. Name models of your own with `model=` and `draft=`, and let them choose.
"""

from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from stepspec.langchain import ChatStepSpec


@tool
def count(owner: Literal["Ann", "Ben"], thing: Literal["apples", "cards"]) -> int:
    """Count the things of a person."""
    return {"apples": 3, "cards": 12}[thing] + (4 if owner == "Ben" else 0)


model = ChatStepSpec(max_tokens=400, max_thinking_tokens=30)
question = HumanMessage("How many apples does Ben have?")

call = model.bind_tools([count], tool_choice="count").invoke([question])
for each in call.tool_calls:
    print(f"call: {each['name']}({each['args']})")

results = [count.invoke(each) for each in call.tool_calls]  # messages with the tool's results
for each in results:
    print(f"result: {each.content}")

answer = model.invoke([question, call, *results], max_tokens=60)
print(f"answer: {answer.content}")
print(f"tokens: {answer.usage_metadata}")
