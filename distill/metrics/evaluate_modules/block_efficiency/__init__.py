"""Owns nothing: makes the folder a package, so that it is shipped and type-checked.

Refuses to be imported for its content: load the folder with ``evaluate.load``.
"""
