"""Encoders: models in which each position attends to all others, and whose prompts run whole."""
