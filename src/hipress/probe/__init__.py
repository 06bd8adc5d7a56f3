"""Measures what links, messages and codecs cost on this cluster."""
