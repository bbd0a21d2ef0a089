"""Writing the exported folder: staging, weights, configuration, tokenizer, manifest."""
