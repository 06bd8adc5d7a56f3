"""Task graphs as pure data: verbs, partitions, strategies, lowering. No torch, no codecs."""
