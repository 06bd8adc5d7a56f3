"""What ranks tell each other besides gradients: agreement, clocks, heartbeats."""
