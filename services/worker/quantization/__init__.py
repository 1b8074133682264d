"""Formats of quantized checkpoints, each declared once: its tensors, its checks, its bytes."""
