"""The other half of a pair: where it is, and how it is met."""
