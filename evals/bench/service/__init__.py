"""Measurements of the service over HTTP: `python -m evals.bench service.NAME`.

The service runs in a process of its own, the load generator in the process of the command. Both run on one machine, so
the figures include the generator's share of the processors.
"""
