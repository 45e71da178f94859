"""Starts ranks on this host (`zeroshard run`), and joins those that other launchers started.

Nothing here imports torch when it is imported: the command line must answer at once."""
