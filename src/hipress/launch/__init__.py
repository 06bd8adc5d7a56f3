"""Starting ranks: `hipress run` on one machine or many, and `join` in the script that it starts.

hosts         which hosts, and how many ranks on each
launcher      on your machine: one ssh per host, prefixes, the end of all when one fails
remote        its way to the agent of one host: ssh, the messages, the connection
failure_text  the sentences about hosts and ranks
screen        prefixes, progress bars, and a file for each rank
agent         on each host: torchrun, whose ranks it reads and ends
torchrun      what torchrun and its ranks are given
rank          around each rank: hands its output on, kills what it leaves, reports its end
world         in a script: the same variables under torchrun, srun, mpirun and alone
"""

from hipress.launch.world import World, join

__all__ = ["World", "join"]
