"""Names of checks that both processes must know."""

LEFT_PADDED = "left-padded batch logits"
RIGHT_PADDED = "right-padded batch logits"
