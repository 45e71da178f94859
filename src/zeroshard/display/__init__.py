"""A live picture of a training run in the terminal, for any training loop.

    from zeroshard.display import Live, Reading

    with Live("GPT, 5.7 M parameters", rank=run.rank) as live:
        for step in range(steps):
            ...
            live.show(Reading(step=step, done=step / steps, loss=loss.item()))

The words:

  reading   what a loop knows at one step. **record**: all of them so far, which is what the curve needs
  plain     what plain data parallel training would need; bars are drawn against it
  frame     the lines on the screen, drawn in place under whatever was printed before; the last one stays
"""

from .figures import bytes_text, clock_text, summary
from .live import Live
from .reading import Plain, Reading

__all__ = ["Live", "Plain", "Reading", "bytes_text", "clock_text", "summary"]
