"""Problem generators: gsm-mini and gsm-plain. They do not depend on models or tokenizers."""
