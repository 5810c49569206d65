"""Detection, diagnosis and end of a hang: ranks that wait for one that never arrives.

Every rank has a thread and a socket for it, since a rank that hangs runs no other code.
"""
