"""Anthropic's Messages API: /v1/messages and what belongs to it."""
