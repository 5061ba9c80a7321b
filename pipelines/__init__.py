"""Compositions: which stages run, in what order, wired to what.

Refuses to know tensors, models and paths: those belong to the stages.
"""
