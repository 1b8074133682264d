"""What the headers of Anthropic's clients say."""

from __future__ import annotations

VERSION_HEADER = "anthropic-version"
"""Every one of these clients sends it. Answers are the same for all versions."""
