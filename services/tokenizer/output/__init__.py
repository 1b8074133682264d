"""A model's output as events: content, reasoning, tool calls.

Each wire form is a table (``families/``) over one engine. ``machine.build_machine`` prepares a
table for a vocabulary, and an ``OutputParser`` reads one choice with it.
"""
