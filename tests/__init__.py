"""Owns nothing but the package name, so that ``from tests.helpers import ...`` finds this folder.
Refuses to hold fixtures or helpers: those are in conftest.py and helpers.py.
"""
