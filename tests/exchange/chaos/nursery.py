"""Where processes are born grown up: forked from one that has loaded PyTorch, in milliseconds.

A process of its own: reads a line of JSON for each child, {"module", "arguments", "log"}, and writes {"born": pid} and,
once one ends, {"died": pid, "code": number}. Its children end with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import selectors
import signal
import sys
import traceback
from typing import Any

MODULES = ("paceline.exchange.server.__main__", "tests.exchange.chaos.toil", "paceline.exchange.membership.__main__")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    for module in MODULES:
        importlib.import_module(module)
    wake_in, wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_out)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(wake_in, selectors.EVENT_READ)
    say({"ready": True})
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                say({"born": bear(**json.loads(line))})
            else:
                os.read(wake_in, 4096)
                reap()


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say({"died": pid, "code": os.waitstatus_to_exitcode(status)})


def bear(module: str, arguments: list[str], log: str) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = [module, *arguments]
        code = importlib.import_module(module).main() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
