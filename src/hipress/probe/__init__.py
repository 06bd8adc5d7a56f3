"""Measures what links, messages and codecs cost on this cluster."""

CODECS = ("none", "fp16", "bf16", "int8", "onebit", "dgc(ratio=0.001)", "topk(ratio=0.01)")
"""Codecs of a profile, unless the user names others."""
