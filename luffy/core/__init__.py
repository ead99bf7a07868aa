"""The algorithm: pure torch, tensors in, tensors out, no I/O."""
