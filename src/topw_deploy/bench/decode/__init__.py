"""`topw bench decode`: the decoding loops of this project and of other libraries, over the same weights."""
