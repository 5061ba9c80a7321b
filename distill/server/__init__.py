"""The OpenAI-compatible server of a target and its draft.

Refuses to know how models are loaded and where artifacts are: `stages.serve` does.
"""
