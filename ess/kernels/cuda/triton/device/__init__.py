"""What runs on the device, in the language of Triton, which type checkers cannot read.

Numbers that change with the batch or the context are not specialized: Triton would compile anew, in
the middle of serving, when a count becomes 1 or a multiple of 16. None of them bounds a mask along
the columns that loads are made of, so nothing is lost.
"""
