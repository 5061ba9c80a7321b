"""Owns the measurements behind scripts/bench_* and scripts/gpu_check: rounds, rivals, tables.
Refuses to be a part of the library: it is not installed, and nothing in distill/ imports it.
"""
