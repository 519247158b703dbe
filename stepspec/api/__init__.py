"""The Python API: sessions, pairs of models, and what a pair has learned."""
