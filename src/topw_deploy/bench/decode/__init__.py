"""`topw bench decode`: decoding loops of this project and other libraries over the same weights."""
