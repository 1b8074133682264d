"""The commands that talk to a running server, or look after models on this disk.

None of them is a process of a server, and none imports anything heavy before its flags are read.
"""
