"""`topw bench sampler`: time one step of several samplers on the same logits."""
