"""How a model could be laid out over several GPUs, and how fast that would be."""
