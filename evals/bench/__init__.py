"""Benchmarks of stepspec itself: engines, controller, LangChain, grading, statistics."""
