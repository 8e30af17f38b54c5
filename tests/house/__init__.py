"""What the house rules look at: the tree, its imports, its names, its numbers.

`python -m tests.house` prints the numbers by which the code is judged; tests/test_tidy.py holds it
to the rules.
"""
