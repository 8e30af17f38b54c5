"""A checkpoint's files, read as input that may be hostile.

folder       the one place that opens them
header       the header of a safetensors file, believed as far as it can be proved
strict_json  JSON, bounded before it is parsed
placement    which file holds which tensor
fingerprint  whether two workers serve the same checkpoint
"""
