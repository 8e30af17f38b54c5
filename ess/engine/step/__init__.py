"""One step of the engine: prompts, decode, drafts, and what the host learns late."""
