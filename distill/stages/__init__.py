"""Stages: each owns its config, its CODE_VERSION and one function (config, store) -> Artifact.

Refuses to know the order they run in; a pipeline wires them.
"""
