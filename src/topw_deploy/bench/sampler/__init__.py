"""`topw bench sampler`: one step of several samplers over the same logits."""
