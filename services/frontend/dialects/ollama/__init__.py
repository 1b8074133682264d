"""Ollama's API: chats and prompts, and what it says of the models."""
