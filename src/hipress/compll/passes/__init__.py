"""The middle: checked values in, a flat list of fused passes out."""
