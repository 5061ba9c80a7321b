"""Backends: who runs the target. ``base`` holds the contract, every other file one backend.

Refuses to know which prompts are asked and what becomes of the answers.
"""
