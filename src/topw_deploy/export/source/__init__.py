"""Find and read the model to export."""
