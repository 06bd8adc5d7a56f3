"""CompLL: a compression program in, kernels out.

The rooms, in walking order: `parse` (text to tree), `check` (tree to a checked graph of values),
`passes` (graph to a short flat list of fused passes over memory), `derive` (error feedback,
momentum and decode-add from one program), `reference` and `cpu` (passes to source), `build`
(the whole way, with the on-disk cache) and `emit` (an importable module for a framework).
"""
