"""The `shm` group without native code: for machines that have no compiler.

`group` is what `torch.distributed` sees. `calls` says what each collective shows and takes, `rounds` runs it, `reduce`
adds up; `messages` sends and receives. `peers` meet, wait for each other and learn that one is gone; `window` is the
memory that they share, `work` what c10d waits for.
"""

from paceline.shm.portable.group import PortableGroup

__all__ = ["PortableGroup"]
