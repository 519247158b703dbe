"""Evaluation: benchmarks, runs and their records, grading, statistics, reports."""
