"""The form that an answer must have, made from what a body asks."""
