"""Starting ranks: `hipress run` on one machine or many, and `join` in the script that it starts.

launcher   on your machine: one ssh per host, prefixes, the end of all when one fails
agent      on each host: torchrun, whose ranks it reads and ends
rank       around each rank: hands its output on, kills what it leaves, reports its end
world      in a script: the same variables under torchrun, srun, mpirun and alone
"""

from hipress.launch.world import World, join

__all__ = ["World", "join"]
