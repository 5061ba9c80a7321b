"""Owns the report of a run: what was trained, what it is worth, whether to ship it.

Refuses to measure anything: every number is read from an artifact.
"""

from __future__ import annotations

from distill.report.build import build_report
from distill.report.compare import compare_runs, comparison_table, served_table
from distill.report.render import report_table, write_report

__all__ = [
    "build_report",
    "compare_runs",
    "comparison_table",
    "report_table",
    "served_table",
    "write_report",
]
