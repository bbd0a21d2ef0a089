"""`topw bench decode`: decoding loops of several libraries over the same weights."""
