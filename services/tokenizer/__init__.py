"""The tokenizer: chat templates, encoding, incremental decoding and stop strings. No torch."""
