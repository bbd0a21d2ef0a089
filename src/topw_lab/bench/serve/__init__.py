"""`topw bench serve`: time the requests of many callers to one model."""
