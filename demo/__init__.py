"""The model ``penstock-demo``: its training text, tokenizer, trainer and questions."""
