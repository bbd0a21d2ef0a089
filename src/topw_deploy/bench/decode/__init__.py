"""`topw bench decode`: a whole decoding loop, ours and others', over the same weights."""
