"""CaSync: averages gradients over the network; every rank gets the same bits.

In walking order: `graphs` cuts gradients into chunks, builds the task graph of a strategy and
lowers it (pure data). `engine` agrees on a recipe, binds its graph to buffers and codecs as an
exchange, and runs that with an executor over a transport. `ranks` compares what ranks were given,
watches their heartbeats and measures their clocks.
"""
