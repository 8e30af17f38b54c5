"""The way that models write calls, as grammars."""
