"""`topw bench serve`: requests of many callers on one model."""
