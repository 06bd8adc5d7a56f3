"""SeCoPa: which gradients to compress, how, and in how many partitions; what a step will take."""
