"""The certified algorithm in numpy: the reference's kept sets, without the work that proofs make unnecessary."""
