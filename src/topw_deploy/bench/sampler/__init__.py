"""`topw bench sampler`: what one sampling step costs, ours and others', over the same logits."""
