"""How ranks come to be: `zeroshard run` starts them on this host, and `join` meets those that others started.

Nothing here imports torch when it is imported: the command line must answer at once.
"""
