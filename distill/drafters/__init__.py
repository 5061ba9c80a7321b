"""Owns the ways a draft proposes tokens; each file registers one under its name.
Refuses to know whether a proposal is accepted: that is ``runtime.verify``'s business.
"""
