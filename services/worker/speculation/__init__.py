"""Speculative decoding: drafts from texts, draft models and heads, and how many of them pay."""
