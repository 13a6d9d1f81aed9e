"""Runs a module as a child that ends with its parent: python -m deploy.child PARENT_PID MODULE ...

On Linux also when the parent is killed, or the thread in it that started this process ends.
"""

import os
import runpy
import sys

from core.process import end_with_parent


def main() -> None:
    """Run the module as if it had been started itself."""
    parent_pid, module, *arguments = sys.argv[1:]
    end_with_parent()
    if sys.platform == "linux" and os.getppid() != int(parent_pid):
        sys.exit(1)  # it ended before this process could ask to be told
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
