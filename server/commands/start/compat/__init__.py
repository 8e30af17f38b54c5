"""Flags of vLLM and SGLang: what each sets here, or what is said of it."""
