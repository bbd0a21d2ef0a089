"""`topw stats --exact`: crops under the paper's exact objective F, whose transport the decoding rule never solves.

`objective` finds the least F over all prefixes of an order; `analyse` compares one step's crops; `summary` counts.
"""
