"""`topw stats --exact`: crops under the paper's exact objective F, which needs the transport that Top-W avoids.

objective: F of a set, and the least F over all prefixes of an order.
transport: solves one transport problem.
analyse: compares the crops of one step.
"""
