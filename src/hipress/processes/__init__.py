"""Child processes, for emulated clusters (`lab`) and for `hipress run` (`launch`).

family     starting and ending: who ends with whom, signals for all descendants, reaping
pipes      reading and writing: lines from bytes, and writers that never wait for a slow reader
"""
