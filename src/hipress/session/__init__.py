"""The core that every framework shares."""
