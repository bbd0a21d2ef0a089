"""Continue an interrupted export."""
