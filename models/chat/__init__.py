"""Conversations to prompts and replies to messages, one module per format."""
