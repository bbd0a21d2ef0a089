"""The commands `topw` and `topw-export`."""
