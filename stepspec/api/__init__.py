"""The Python API: sessions, model pairs, and the scope of a pair."""
