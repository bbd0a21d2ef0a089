"""`topw bench sampler`: one step of this project's and other samplers over the same logits."""
