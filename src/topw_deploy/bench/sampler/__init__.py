"""`topw bench sampler`: one sampling step of this project and of other samplers, over the same logits."""
