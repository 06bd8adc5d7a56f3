"""SeCoPa: which gradients to compress, how, and in how many slices; what a step will take."""
