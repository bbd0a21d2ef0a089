"""Train the bundled model: its tokenizer and its training loop."""
