"""A stand-in for torch that holds a torchrun only, and starts in 50 ms."""
