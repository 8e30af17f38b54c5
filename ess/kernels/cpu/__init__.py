"""The ops of a CPU: native code, and what binds it."""
