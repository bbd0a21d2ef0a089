"""`topw stats --exact`: crops under the paper's exact objective F, which needs the transport that Top-W avoids.

objective: F of a set of tokens, the least F over all prefixes of an order, and the transport problem in F.
analyse: compares the crops that several rules keep at one step.
"""
