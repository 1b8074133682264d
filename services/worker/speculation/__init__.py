"""Speculative decoding without a model: drafts from texts, and how many of them pay."""
