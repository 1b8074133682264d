"""What stands for that which no model here can see."""

from __future__ import annotations

IMAGE = "[An image, which you cannot see: you read text alone.]"
"""What a model is told of an image among a tool's results. The model has asked for it, not a user,
and the conversation would end there: the client sends it again in every further request."""
