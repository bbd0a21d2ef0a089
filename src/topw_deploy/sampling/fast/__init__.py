"""The reference's kept sets in numpy, a row at a time, without the work that proofs make unnecessary."""
