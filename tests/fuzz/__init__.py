"""A fuzzer that is led by the lines it reaches: python -m tests.fuzz --help."""
