"""The fields of the requests. Fields that a schema does not declare are parameters of the engine (`parameters`)."""
