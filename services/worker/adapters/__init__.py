"""LoRA adapters: read from PEFT folders, and added to the linear layers of a model."""
