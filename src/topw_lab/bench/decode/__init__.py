"""`topw bench decode`: time the decoding loops of several libraries with the same weights."""
