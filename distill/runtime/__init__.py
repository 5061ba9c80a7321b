"""Owns nothing itself: the parts of lossless speculative decoding live in the modules beside it.
Refuses to import them: whoever needs ``verify`` must not pay for transformers.
"""
