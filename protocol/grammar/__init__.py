"""Structured outputs: what may be asked for, and how it is compiled."""
