"""Owns the numbers a pair is judged by: acceptance, intervals, the speed model, timing.

Refuses to know where records come from or how they are shown: pure functions over counts.
"""
