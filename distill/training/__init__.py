"""Owns training a draft: data in memory, the loop, the choice of the best weights, checkpoints.

Refuses to know artifacts' keys, and where the draft goes afterwards.
"""

from __future__ import annotations
