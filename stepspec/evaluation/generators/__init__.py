"""The problem generator of gsm-mini. It does not depend on models or tokenizers."""
