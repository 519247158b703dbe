"""Chat: templates and prompts, tools, tool calls, and the reader of the answer."""
