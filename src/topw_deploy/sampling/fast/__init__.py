"""The reference's crops in numpy, one row at a time, without provably unnecessary work."""
