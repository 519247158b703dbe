"""The generator of gsm-mini, and what trains and measures the embedded pair with it. Not installed."""
