"""`topw bench serve`: requests of many callers to one model."""
