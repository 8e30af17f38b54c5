"""The ops of a CUDA device in Triton. `ops` is the checked door; the rest trusts its caller."""
