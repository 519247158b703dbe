"""Generators of problems: gsm-mini and gsm-plain. They know nothing of models or tokenizers."""
