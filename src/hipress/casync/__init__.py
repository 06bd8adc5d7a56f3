"""CaSync: gradients across the network and back, averaged, the same bits on every rank.

In walking order: `chunks` says how gradients are cut, `strategies` build a `graph`, `lowering`
makes it what runs; a `recipe` holds all that. `job` gives slots `memory` and tasks functions;
`executor` (or `ordered`) runs them over a `transport`. `engine` looks everything up, `agree` and
`health` watch over the ranks, `world` is the door.
"""
