"""The pipeline of prefill stages."""
