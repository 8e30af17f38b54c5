"""The ops of a CPU: native code, and its bindings."""
