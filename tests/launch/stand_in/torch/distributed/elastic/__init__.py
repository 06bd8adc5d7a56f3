"""See rendezvous.py."""
