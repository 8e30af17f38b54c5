"""How the embedded model was made. In the repository only, not in the wheel."""
